import pytest
from bookkeeping import (
    Bench,
    cache_prompt,
    compute,
    expected_stream,
    full,
    hit_tokens,
    make_coordinator,
    make_request,
    sliding,
    state,
)

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.base import NEVER
from hybrid_engine.step_plan import WHOLE_BLOCK


def test_passed_window_blocks_stay_findable_while_memory_is_idle():
    bench = Bench([full(), sliding(32)], 60)
    bench.run_one(range(320), max_tokens=4)
    fork = bench.run_one([*range(160), *range(7000, 7010)])
    assert fork.cache.hit == 160


def test_passed_window_blocks_go_before_those_below_the_prompts_end():
    coordinator = make_coordinator([sliding(32)], 30)
    request = make_request(coordinator, range(320), max_tokens=100)
    for end in range(64, 321, 64):
        compute(coordinator, request, end)
    for token in range(64):
        request.append_token(5000 + token)
        compute(coordinator, request)
    manager = coordinator.managers[0]
    keys = [manager.key(request.block_hashes, k) for k in range(24)]
    leaving = [keys.index(block.block_hash) for block in manager.pool.free]
    # The prompt ends with block 19; its window, and the one for the same prompt again, are blocks 17 to 19.
    assert leaving == [*range(17), 20, 21, 17, 18, 19]


def test_one_groups_allocation_cannot_evict_another_groups_hit():
    coordinator = make_coordinator([full(), sliding(16)], [8, 3])
    cache_prompt(coordinator, range(33))
    request = make_request(coordinator, range(100))
    hit, blocks = coordinator.look_up(request)
    before = [manager.pool.num_free for manager in coordinator.managers]
    # The window pool can't hold the hit and four more blocks: nothing may change in the other.
    assert not coordinator.allocate_slots(
        request, 60, num_new_computed_tokens=hit.num_computed_tokens, new_computed_blocks=blocks
    )
    assert [manager.pool.num_free for manager in coordinator.managers] == before
    assert hit_tokens(coordinator, range(100)) == hit.num_computed_tokens


def test_a_parent_outlives_its_children():
    coordinator = make_coordinator([full()], 10)
    cache_prompt(coordinator, range(160))
    lengths = []
    for k in range(10):
        lengths.append(hit_tokens(coordinator, range(161)))
        blocker = make_request(coordinator, range(1000 + 16 * k, 1016 + 16 * k), f"b{k}")
        assert coordinator.allocate_slots(blocker, 16)
    assert lengths == list(range(160, 0, -16))


def test_a_key_is_not_found_before_its_step_has_finished():
    bench = Bench([full()], 20)
    bench.add(range(64), "a", max_tokens=2)
    bench.scheduler.schedule()
    assert hit_tokens(bench.coordinator, range(65)) == 0


def test_nothing_is_found_after_a_reset_and_running_requests_go_on():
    bench = Bench([full(), sliding(32)], 40)
    running = bench.add(range(50), max_tokens=30)
    bench.step()
    bench.coordinator.reset_prefix_cache()
    assert hit_tokens(bench.coordinator, range(60)) == 0
    bench.run()
    assert running.output_token_ids == expected_stream(range(50), 30)


def test_a_disabled_prefix_cache_never_hits_and_says_so():
    bench = Bench([full()], 20, enable_prefix_caching=False)
    bench.run_one(range(40))
    again = bench.run_one(range(40))
    assert (again.cache.hit, again.cache.disabled) == (0, 39)


@pytest.mark.parametrize(
    ("specs", "num_blocks", "capacity"),
    [
        ([full()], [10], 160),
        ([full(), sliding(32)], [10, 5], 160),
        ([full(), sliding(32)], [10, 2], 32),
        ([sliding(32)], [4], NEVER),
    ],
)
def test_capacity_is_what_one_request_alone_can_hold(specs, num_blocks, capacity):
    assert make_coordinator(specs, num_blocks).capacity_tokens == capacity


@pytest.mark.parametrize("num_window_blocks", [3, 4, 10])
def test_the_capacity_that_is_reported_can_be_filled(num_window_blocks):
    bench = Bench([full(), sliding(32)], [20, num_window_blocks])
    capacity = bench.coordinator.capacity_tokens
    request = bench.run_one(range(capacity), max_tokens=5)
    assert (request.num_output_tokens, request.num_preemptions) == (1, 0)


def test_a_group_without_blocks_is_refused():
    with pytest.raises(CapacityError, match="more memory"):
        make_coordinator([full()], 0)


def test_a_one_token_prompt_takes_one_block_of_each_group():
    coordinator = make_coordinator([full(), sliding(512)], 10)
    compute(coordinator, make_request(coordinator, [1]))
    assert [usage.num_held for usage in coordinator.usage()] == [1, 1]


def test_until_the_next_step_the_bytes_of_a_moved_block_lie_where_they_were():
    # Blocks of 128 bytes and of 384: an extent holds three of the first kind.
    coordinator = make_coordinator([full(4), full(12)], memory_bytes=384 * 3)
    small, large = (manager.pool for manager in coordinator.managers)
    blocks = small.take(6)
    before = {block: block.block_id for block in blocks}
    small.release(blocks[1:3] + blocks[4:])
    large.take(1)
    moved = [block for block in blocks if block.ref_count and block.block_id != before[block]]
    assert [coordinator.memory.stored_id(0, block) for block in moved] == [before[block] for block in moved] != []
    copies, moves = coordinator.memory.take_copies()
    assert [(copy.source_id, copy.target_id, copy.num_slots) for copy in copies] == [
        (move.source_id, move.target_id, WHOLE_BLOCK) for move in moves
    ]


@pytest.mark.parametrize("specs", [[full(4), state(100)], [full(4), sliding(8, 12), state(1000)]])
def test_a_prompt_of_one_token_takes_one_block_in_each_group(specs):
    coordinator = make_coordinator(specs, memory_bytes=2_000_000)
    compute(coordinator, make_request(coordinator, [1]))
    memory = coordinator.memory
    sizes = [pages.stride_bytes for pages in memory.layout.pages]
    taken = sum(pool.num_held * size for pool, size in zip(memory.pools, sizes, strict=True))
    assert taken <= 2 * sum(group.block_bytes for group in coordinator.groups)
