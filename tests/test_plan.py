import pytest
from bookkeeping import chunked, full, sliding, state
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.spec import FullAttentionSpec, SlidingWindowSpec, group_layers
from hybrid_engine.plan import plan_memory

GEMMA = group_layers(
    {i: FullAttentionSpec(1, 256, 2) if i % 6 == 5 else SlidingWindowSpec(1, 256, 2, window=512) for i in range(18)}
)
LIMITS = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_scheduled_tokens": 2048}


@pytest.mark.parametrize("memory_bytes", [1 << 20, 20 << 20, 100 << 20, 1 << 30])
def test_the_pools_fit_in_the_memory_and_leave_little(memory_bytes):
    plan = plan_memory(GEMMA, memory_bytes, **LIMITS)
    assert plan.used_bytes <= memory_bytes
    assert plan.used_bytes >= 0.8 * memory_bytes or max(plan.num_blocks) > 1000


def test_one_longest_request_fits_where_memory_allows():
    plan = plan_memory(GEMMA, 100 << 20, **LIMITS)
    assert Coordinator(plan.groups, plan.num_blocks).capacity_tokens >= 8192


def test_chunks_stay_large_where_the_longest_request_does_not_fit():
    plan = plan_memory(GEMMA, 64 << 20, **LIMITS | {"max_model_len": 131_072})
    windows, full_attention = plan.num_blocks
    assert windows * 16 >= 512 + 2048
    assert 2048 <= full_attention * 16 < 131_072


def test_what_all_requests_can_hold_is_enough():
    plan = plan_memory(group_layers({0: full()}), 1 << 40, max_model_len=64, max_num_seqs=2, max_num_scheduled_tokens=8)
    assert plan.num_blocks == (16,)


def test_states_for_drafts_are_planned_for_the_longest_request_and_for_typical_ones():
    groups = group_layers({0: full(), 1: state()})
    limits = {"max_model_len": 64, "max_num_seqs": 4, "max_num_scheduled_tokens": 8}
    few, many = (plan_memory(groups, 20_000, **limits, num_draft_slots=n).num_blocks for n in (0, 3))
    assert many[1] > few[1]
    assert plan_memory(groups, 1 << 40, **limits, num_draft_slots=3).num_blocks[1] >= 4 * (1 + 3)


@pytest.mark.parametrize("memory_bytes", [100_000, 10_000_000])
def test_recurrent_states_get_their_share_whether_the_longest_request_fits_or_not(memory_bytes):
    groups = group_layers({0: full(), 1: state()})
    limits = {"max_model_len": 4096, "max_num_seqs": 64, "max_num_scheduled_tokens": 256}
    plan = plan_memory(groups, memory_bytes, **limits)
    state_bytes = plan.num_blocks[1] * groups[1].block_bytes
    assert plan.used_bytes <= memory_bytes
    assert state_bytes >= 0.09 * memory_bytes or plan.num_blocks[1] >= 2 * 64 * 5


def test_a_request_comes_before_the_share_of_the_states():
    groups = group_layers({0: full(), 1: state(size=100)})
    needed = 2 * sum(group.block_bytes for group in groups)
    plan = plan_memory(groups, needed, max_model_len=4096, max_num_seqs=64, max_num_scheduled_tokens=256)
    assert plan.num_blocks == (1, 1)


def test_memory_below_one_block_a_group_is_refused_with_the_bytes_that_would_do():
    with pytest.raises(CapacityError, match="give at least that much"):
        plan_memory(GEMMA, 1000, **LIMITS)


def test_windows_alone_reach_any_length_with_a_chunk_that_fits():
    groups = group_layers({0: SlidingWindowSpec(1, 8, 2, window=64)})
    plan = plan_memory(groups, 16 * 32 * 9, max_model_len=10_000, max_num_seqs=2, max_num_scheduled_tokens=2048)
    assert Coordinator(plan.groups, plan.num_blocks).capacity_tokens >= 10_000


@given(
    memory_bytes=st.integers(50_000, 10**9),
    max_model_len=st.integers(1, 100_000),
    max_num_scheduled_tokens=st.integers(1, 5000),
)
def test_any_plan_fits_and_gives_every_group_a_block(memory_bytes, max_model_len, max_num_scheduled_tokens):
    groups = group_layers({0: full(), 1: sliding(100), 2: chunked(64, 32), 3: full(32)})
    plan = plan_memory(
        groups,
        memory_bytes,
        max_model_len=max_model_len,
        max_num_seqs=8,
        max_num_scheduled_tokens=max_num_scheduled_tokens,
    )
    assert plan.used_bytes <= memory_bytes
    assert min(plan.num_blocks) >= 1
