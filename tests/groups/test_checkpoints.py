"""Checkpoints of long prompts: which are spare, and that the spare ones are lost last in plenty and first in need."""

import pytest
from bookkeeping import Bench, full, hit_tokens, state

from hybrid_engine.groups.checkpoints import is_spare

INTERVAL = 16


def kept(num_intervals: int) -> list[int]:
    """Of a path of so many intervals, those that are not spare."""
    return [index for index in range(1, num_intervals + 1) if not is_spare(index * 10, num_intervals * 10, 10)]


@pytest.mark.parametrize(
    ("num_intervals", "expected"),
    [(4, [1, 2, 3, 4]), (6, [2, 3, 4, 5, 6]), (9, [2, 4, 6, 7, 8, 9]), (20, [8, 12, 14, 16, 17, 18, 19, 20])],
)
def test_the_spacing_doubles_with_the_distance_from_the_paths_end(num_intervals, expected):
    assert kept(num_intervals) == expected


def test_what_is_spare_stays_so_as_the_path_grows():
    for num_intervals in range(1, 300):
        assert set(kept(num_intervals + 1)) <= {*kept(num_intervals), num_intervals + 1}


@pytest.mark.parametrize("num_intervals", [10, 100, 1000])
def test_few_are_kept_and_a_fork_computes_at_most_half_its_distance_again(num_intervals):
    indices = [0, *kept(num_intervals)]
    assert len(indices) <= 5 + 2 * num_intervals.bit_length()
    for fork in range(num_intervals):
        nearest = max(index for index in indices if index <= fork)
        assert fork - nearest <= max(0, (num_intervals - nearest) / 2)


@pytest.fixture
def long_prompt():
    return list(range(20 * INTERVAL + 5))


def positions(bench: Bench) -> list[int]:
    return sorted(checkpoint.position // INTERVAL for checkpoint in bench.coordinator.checkpoints)


def make_bench(num_states: int) -> Bench:
    return Bench([full(), state()], [60, num_states], checkpoint_interval=INTERVAL, max_num_scheduled_tokens=INTERVAL)


def test_where_memory_is_ample_no_checkpoint_is_lost(long_prompt):
    bench = make_bench(40)
    bench.run_one(long_prompt)
    assert set(range(1, 21)) <= set(positions(bench))


def test_a_long_prompt_holds_few_states_while_it_runs(long_prompt):
    bench = make_bench(100)
    request = bench.add(long_prompt, max_tokens=5)
    while request.num_output_tokens < 3:
        bench.step()
    pinned = sorted(checkpoint.position // INTERVAL for checkpoint, _ in request.held.pinned)
    # 20 is the end of the prompt's last block and the prompt's end lies behind it: both have a reason of their own.
    assert pinned == [*kept(19), 20, 20]


def test_in_need_the_spare_ones_go_first(long_prompt):
    bench = make_bench(24)
    bench.run_one([7000, 7001], "older")
    bench.run_one(long_prompt)
    for i in range(4):
        bench.run_one([8000 + i] * 2, f"other{i}")
    assert set(kept(19)) <= set(positions(bench))
    assert len(positions(bench)) < 24
    assert hit_tokens(bench.coordinator, [7000, 7001, 9]) == 2  # older than all of the long prompt's


def test_one_that_was_used_is_no_longer_spare(long_prompt):
    bench = make_bench(26)
    bench.run_one(long_prompt)
    assert bench.run_one([*long_prompt[: 3 * INTERVAL], 5000], "fork").cache.hit == 3 * INTERVAL
    for i in range(6):
        bench.run_one([8000 + i] * 2, f"other{i}")
    assert 3 in positions(bench)
    assert 5 not in positions(bench)
