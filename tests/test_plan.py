import pytest
from bookkeeping import chunked, full, sliding, state
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.base import NEVER
from hybrid_engine.groups.spec import FullAttentionSpec, SlidingWindowSpec, group_layers
from hybrid_engine.plan import plan_memory

GEMMA = group_layers(
    {i: FullAttentionSpec(1, 256, 2) if i % 6 == 5 else SlidingWindowSpec(1, 256, 2, window=512) for i in range(18)}
)


@pytest.mark.parametrize("memory_bytes", [20 << 20, 100 << 20, 1 << 30])
def test_all_but_little_of_the_memory_is_used(memory_bytes):
    plan = plan_memory(GEMMA, memory_bytes)
    assert 0.98 * memory_bytes <= plan.used_bytes <= memory_bytes


def test_one_request_can_have_all_that_the_others_leave():
    plan = plan_memory(GEMMA, 100 << 20)
    # 32 blocks of a window of 512 tokens, computed one by one, and the block that its end lies in.
    left = (100 << 20) - GEMMA[0].block_bytes - 33 * GEMMA[0].block_bytes
    assert plan.capacity_tokens == left // GEMMA[0].block_bytes * 5 * 16


def test_the_bytes_of_a_request_are_those_of_its_blocks():
    bytes_of = plan_memory(GEMMA, 100 << 20).request_bytes(10_000, chunk_tokens=512)
    assert bytes_of == {0: GEMMA[0].block_bytes * 65, 1: GEMMA[1].block_bytes * 625}


def test_as_many_requests_fit_as_their_blocks_do():
    groups = group_layers({0: full(), 1: state(size=64)})
    plan = plan_memory(groups, 1_000_000)
    num_requests = plan.num_requests(1000, num_states=3)
    bytes_each = sum(plan.request_bytes(1000, num_states=3).values())
    assert (num_requests - 1) * bytes_each <= 1_000_000 < (num_requests + 2) * bytes_each


def test_memory_below_one_block_a_group_is_refused_with_the_bytes_that_would_do():
    needed = 3 * GEMMA[0].block_bytes
    with pytest.raises(CapacityError, match=f"{needed:,} with the null block: give at least that much"):
        plan_memory(GEMMA, needed - 1)
    assert plan_memory(GEMMA, needed).capacity_tokens >= 1


def test_windows_alone_reach_any_length():
    plan = plan_memory(group_layers({0: SlidingWindowSpec(1, 8, 2, window=64)}), 16 * 32 * 9)
    assert plan.capacity_tokens == NEVER


@settings(deadline=None)
@given(memory_bytes=st.integers(50_000, 10**9))
def test_any_plan_fits_and_gives_every_group_a_block(memory_bytes):
    groups = group_layers({0: full(), 1: sliding(100), 2: chunked(64, 32), 3: full(32)})
    plan = plan_memory(groups, memory_bytes)
    plan.layout.check()
    assert plan.used_bytes <= memory_bytes
    assert plan.capacity_tokens >= 1


@pytest.mark.parametrize("num_requests", [1, 40])
def test_the_memory_that_is_needed_holds_so_many_requests_and_a_little_less_does_not(num_requests):
    groups = group_layers({0: full(), 1: state(size=64)})
    needed = plan_memory(groups, 1_000_000).needed_bytes(num_requests, 1000, num_states=2)
    assert plan_memory(groups, needed).num_requests(1000, num_states=2) >= num_requests
    assert plan_memory(groups, int(0.97 * needed)).num_requests(1000, num_states=2) < num_requests
