import pytest
from bookkeeping import full, state

from hybrid_engine.bench.mixes import LONG, SHORT, Mix, Shape, concurrency, mean_bytes, num_requests, search_split
from hybrid_engine.groups.layout import share_memory, split_memory
from hybrid_engine.groups.spec import group_layers

GROUPS = group_layers({0: full(64), 1: state(1000)})
MIX = Mix("short", (Shape((64, 640), (5, 30)),))
MEMORY_BYTES = 1_000_000


@pytest.mark.slow
def test_the_arena_runs_as_many_as_the_best_split_of_the_same_memory():
    best, share = search_split(GROUPS, 3 * MEMORY_BYTES, MIX)
    assert concurrency(GROUPS, share_memory(GROUPS, 3 * MEMORY_BYTES), MIX) >= 0.95 * best
    assert 0.05 < share < 0.95


@pytest.mark.slow
def test_a_split_that_favours_one_group_runs_fewer():
    counts = [int(MEMORY_BYTES * part) // group.block_bytes for part, group in zip((0.95, 0.05), GROUPS, strict=True)]
    shared = concurrency(GROUPS, share_memory(GROUPS, MEMORY_BYTES), MIX)
    assert concurrency(GROUPS, split_memory(GROUPS, counts), MIX) < 0.6 * shared


def test_as_many_run_as_their_mean_bytes_allow():
    running = concurrency(GROUPS, share_memory(GROUPS, MEMORY_BYTES), MIX)
    assert running == pytest.approx(MEMORY_BYTES / sum(mean_bytes(GROUPS, MIX)), rel=0.15)


def test_half_the_tokens_of_the_mixed_traffic_are_those_of_long_contexts():
    from hybrid_engine.bench.mixes import MIXES

    shapes = MIXES[2].shapes
    num_short = shapes.count(SHORT) * SHORT.mean_tokens
    assert num_short == pytest.approx(shapes.count(LONG) * LONG.mean_tokens, rel=0.05)


def test_enough_requests_come_to_fill_the_memory_more_than_once():
    assert num_requests(GROUPS, MEMORY_BYTES, MIX) * sum(mean_bytes(GROUPS, MIX)) > 3 * MEMORY_BYTES
