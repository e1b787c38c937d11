import pytest
from bookkeeping import Bench, full, sliding

from hybrid_engine.explanation import CacheExplanation, explain


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


def test_the_parts_add_up_or_it_is_an_error():
    with pytest.raises(AssertionError, match="adds up to 9"):
        CacheExplanation(10, 4, 1, 1, 1, 1, 0)


@pytest.mark.parametrize(
    ("positions", "parts"),
    [
        ({"hit": 16, "resumable": 16, "kept": 32, "seen": 32}, (16, 0, 0, 0, 15)),
        ({"hit": 0, "resumable": 16, "kept": 16, "seen": 24}, (0, 7, 8, 16, 0)),
        ({"hit": 0, "resumable": 0, "kept": 0, "seen": 0}, (0, 31, 0, 0, 0)),
        ({"hit": 31, "resumable": 16, "kept": 16, "seen": 16}, (31, 0, 0, 0, 0)),
    ],
)
def test_each_token_is_attributed_to_the_first_reason_that_holds(positions, parts):
    cache = explain(num_tokens=32, **positions)
    assert (cache.hit, cache.never_seen, cache.evicted, cache.missing_window, cache.alignment) == parts


def test_a_prompt_whose_blocks_were_evicted_says_so():
    bench = Bench([full()], 6)
    bench.run_one(tokens(64))
    bench.run_one(tokens(64, 1000))
    again = bench.run_one([*tokens(64), *tokens(10, 3000)])
    assert (again.cache.hit, again.cache.evicted, again.cache.never_seen) == (32, 32, 9)


def test_an_evicted_key_that_is_forgotten_counts_as_never_seen():
    bench = Bench([full()], 6, max_evicted_keys=0)
    bench.run_one(tokens(64))
    bench.run_one(tokens(64, 1000))
    again = bench.run_one([*tokens(64), *tokens(10, 3000)])
    assert (again.cache.hit, again.cache.evicted, again.cache.never_seen) == (32, 0, 41)


def test_a_window_that_is_gone_says_so():
    bench = Bench([full(), sliding(16)], [40, 6], max_num_scheduled_tokens=32)
    bench.run_one(tokens(320), max_tokens=2)
    fork = bench.run_one([*tokens(160), *tokens(10, 3000)])
    assert (fork.cache.hit, fork.cache.missing_window, fork.cache.never_seen) == (0, 160, 9)


def test_a_checkpoint_inside_a_block_makes_its_tokens_known():
    bench = Bench([full()], 10)
    bench.run_one(tokens(40))
    again = bench.run_one(tokens(40))
    assert (again.cache.hit, again.cache.alignment, again.cache.never_seen) == (32, 7, 0)
