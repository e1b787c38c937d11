"""What the caches give up comes back: scenes with exact answers, on a device that checks what every request reads."""

import pytest
from bookkeeping import expected_stream, full, sliding, state
from tiers import TierBench

from hybrid_engine.groups.spec import LayerSpec

FIRST, SECOND = list(range(100, 200)), list(range(300, 400))
KINDS: dict[str, list[LayerSpec]] = {
    "full": [full()],
    "full and window": [full(), sliding(32)],
    "full and state": [full(), state()],
    "window and state": [sliding(32), state()],
    "all three, blocks of two sizes": [full(16), sliding(48, 32), state()],
    "state": [state()],
}


def make_bench(kind: str = "full", **settings) -> TierBench:
    """Memory for one prompt of 100 tokens and its answer, not for two."""
    return TierBench(KINDS[kind], 9, checkpoint_interval=0, **settings)


@pytest.fixture(params=KINDS)
def bench(request) -> TierBench:
    return make_bench(request.param)


def evict(bench: TierBench) -> None:
    """Let other prompts take all the memory there is."""
    for number in range(4):
        bench.run_one([1000 * (number + 1) + token for token in range(100)], f"other {number}")


def test_a_prompt_that_was_evicted_comes_back_and_only_its_last_block_is_computed(bench):
    bench.run_one(FIRST)
    evict(bench)
    again = bench.run_one(FIRST, "again")
    assert (again.cache.hit, again.cache.external) == (0, 96)
    assert again.output_token_ids == expected_stream(FIRST, 1)


def test_an_answer_and_a_new_turn_go_on_exactly_where_the_answer_ended(bench):
    first = bench.run_one(FIRST, max_tokens=7)
    evict(bench)
    turn = [*first.token_ids, 7, 8, 9]
    again = bench.run_one(turn, "again")
    # The last token of the answer was never computed.
    assert again.cache.hit + again.cache.external == 106
    assert again.output_token_ids == expected_stream(turn, 1)
