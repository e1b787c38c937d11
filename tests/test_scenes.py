"""The scenes of docs/SCENARIOS.md that need full-attention and window groups, by their numbers."""

import pytest
from bookkeeping import (
    Bench,
    cache_prompt,
    chunked,
    compute,
    full,
    hit_tokens,
    lose,
    make_coordinator,
    make_request,
    sliding,
)

from hybrid_engine.errors import PromptTooLongError
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.invariants import check_invariants


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


# Pool and full attention


def test_scene_1_a_prompt_of_whole_blocks_hits_all_but_its_last_block():
    bench = Bench([full()], 10)
    assert bench.run_one(tokens(32)).cache.hit == 0
    again = bench.run_one(tokens(32))
    assert (again.cache.hit, again.cache.alignment, again.cache.num_computed) == (16, 15, 16)
    assert bench.plans[-1].num_tokens == 16
    longer = bench.run_one(tokens(33))
    assert (longer.cache.hit, bench.plans[-1].num_tokens) == (32, 1)


def test_scene_2_a_prompt_that_comes_again_reuses_the_same_blocks():
    bench = Bench([full()], 10)
    bench.run_one(tokens(56))
    first_ids = bench.plans[0].started[0].block_ids[0]
    assert len(first_ids) == 4
    again = bench.run_one(tokens(56))
    assert again.cache.hit == 48
    assert bench.plans[-1].started[0].block_ids[0][:3] == first_ids[:3]


def test_scene_3_a_refused_allocation_changes_nothing():
    coordinator = make_coordinator([full()], 4)
    pool = coordinator.managers[0].pool
    request = make_request(coordinator, tokens(80))
    assert not coordinator.allocate_slots(request, 80)
    assert (pool.num_free, request.held) == (4, None)
    assert coordinator.allocate_slots(make_request(coordinator, tokens(64)), 64)
    assert pool.num_free == 0


def test_scene_4_hit_blocks_count_as_needed():
    coordinator = make_coordinator([full()], 4)
    cache_prompt(coordinator, tokens(48))
    blocker = make_request(coordinator, tokens(16, 1000), "blocker")
    assert coordinator.allocate_slots(blocker, 16)
    request = make_request(coordinator, tokens(53))
    hit, blocks = coordinator.look_up(request)
    assert (hit.num_computed_tokens, coordinator.managers[0].pool.num_free) == (48, 3)
    assert not coordinator.allocate_slots(request, 5, num_new_computed_tokens=48, new_computed_blocks=blocks)


def test_scene_5_nothing_to_allocate_is_an_error():
    coordinator = make_coordinator([full()], 4)
    with pytest.raises(ValueError, match="nothing to allocate"):
        coordinator.allocate_slots(make_request(coordinator, tokens(8)), 0)


def test_scene_6_drafts_occupy_slots_but_are_not_found_before_they_are_accepted():
    coordinator = make_coordinator([full()], 10)
    request = compute(coordinator, make_request(coordinator, tokens(30)))
    request.append_token(30)
    assert coordinator.allocate_slots(request, 1, num_lookahead_tokens=3)
    pool = coordinator.managers[0].pool
    assert (len(request.held.tables[0]), request.held.num_slots >= 34, len(pool.cached)) == (3, True, 1)
    for draft in (31, 32, 33):
        request.append_token(draft)
    request.num_computed_tokens = 34
    coordinator.cache_blocks(request, 34)
    assert len(pool.cached) == 2


def test_scene_7_external_tokens_are_found_when_they_have_arrived():
    coordinator = make_coordinator([full()], 20)
    cache_prompt(coordinator, tokens(32))
    request = make_request(coordinator, tokens(200))
    hit, blocks = coordinator.look_up(request)
    assert coordinator.allocate_slots(
        request,
        0,
        num_new_computed_tokens=hit.num_computed_tokens,
        new_computed_blocks=blocks,
        num_external_computed_tokens=96,
        delay_cache_blocks=True,
    )
    manager = coordinator.managers[0]
    assert (len(request.held.tables[0]), len(manager.pool.cached)) == (8, 2)
    request.num_computed_tokens = 128
    coordinator.cache_blocks(request, 128)
    found = [
        end for end in range(16, 201, 16) if manager.key(request.block_hashes, end // 16 - 1) in manager.pool.cached
    ]
    assert found == [16, 32, 48, 64, 80, 96, 112, 128]
    assert coordinator.allocate_slots(request, 72)
    assert len(request.held.tables[0]) == 13


@pytest.mark.parametrize(("reserved", "is_accepted"), [(6, False), (5, True)])
def test_scene_8_reserved_blocks_stay_free(reserved, is_accepted):
    coordinator = make_coordinator([full()], 10)
    request = make_request(coordinator, tokens(100))
    accepted = coordinator.allocate_slots(request, 0, num_external_computed_tokens=80, reserved_blocks=reserved)
    assert accepted == is_accepted


def test_scene_9_lookahead_slots_are_reused_by_the_next_step():
    coordinator = make_coordinator([full()], 10)
    request = make_request(coordinator, tokens(19))
    assert coordinator.allocate_slots(request, 15, num_lookahead_tokens=3)
    assert len(request.held.tables[0]) == 2
    request.num_computed_tokens = 15
    assert coordinator.allocate_slots(request, 4, num_lookahead_tokens=3)
    assert len(request.held.tables[0]) == 2


# Sliding window, chunked local


@pytest.mark.parametrize(("computed", "skipped"), [(31, 0), (32, 1), (47, 16), (48, 17), (63, 32), (64, 33)])
def test_scene_10_a_window_needs_no_token_below_it(computed, skipped):
    manager = make_coordinator([sliding(32)], 10).managers[0]
    assert manager.num_skipped_tokens(computed) == skipped


@pytest.mark.parametrize(("computed", "num_null"), [(65, 2), (81, 3)])
def test_scene_10_passed_blocks_become_null(computed, num_null):
    coordinator = make_coordinator([sliding(32)], 10)
    request = compute(coordinator, make_request(coordinator, tokens(computed + 1)), computed)
    compute(coordinator, request)
    assert [block.block_id for block in request.held.tables[0]].count(0) == num_null


def test_scene_11_a_hit_needs_only_the_window_below_it():
    coordinator = make_coordinator([full(), sliding(32)], 10)
    cached = cache_prompt(coordinator, tokens(97))
    hits = [hit_tokens(coordinator, tokens(97))]
    _, blocks = coordinator.look_up(make_request(coordinator, tokens(97)))
    assert [block.block_id > 0 for block in blocks[1]] == [False] * 4 + [True] * 2
    for block_index in (0, 1):
        lose(coordinator, 1, cached, block_index)
    hits.append(hit_tokens(coordinator, tokens(97)))
    lose(coordinator, 1, cached, 4)
    hits.append(hit_tokens(coordinator, tokens(97)))
    lose(coordinator, 1, cached, 3)
    hits.append(hit_tokens(coordinator, tokens(97)))
    assert hits == [96, 96, 64, 0]


def test_scene_12_external_tokens_below_the_window_take_no_blocks():
    coordinator = make_coordinator([sliding(32)], 10)
    request = make_request(coordinator, tokens(200))
    assert coordinator.allocate_slots(request, 0, num_external_computed_tokens=160)
    ids = [block.block_id for block in request.held.tables[0]]
    assert (ids[:8], len(ids), min(ids[8:]) > 0) == ([0] * 8, 10, True)


@pytest.mark.parametrize(("computed", "skipped"), [(31, 0), (32, 32), (95, 64), (96, 96)])
def test_scene_13_a_chunked_group_needs_its_chunk(computed, skipped):
    manager = make_coordinator([chunked(32)], 10).managers[0]
    assert manager.num_skipped_tokens(computed) == skipped


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16, 50, 64])
def test_scene_14_a_window_group_holds_no_more_than_its_window_and_a_chunk(chunk_tokens):
    window, block_size = 32, 16
    bench = Bench([full(), sliding(window)], 64, max_num_scheduled_tokens=chunk_tokens)
    request = bench.add(tokens(300), max_tokens=100)
    most = 0
    while bench.scheduler.has_unfinished_requests():
        bench.step()
        if request.held is not None:
            most = max(most, sum(block.block_id != 0 for block in request.held.tables[1]))
    assert most <= -(-(window + chunk_tokens) // block_size) + 1


# Several kinds


def test_scene_16_groups_hold_no_bytes_that_no_layer_needs():
    specs = {i: sliding(512) if i % 5 < 3 else full() for i in range(50)}
    groups = group_layers(specs)
    assert [(group.spec.kind, len(group.layer_indices)) for group in groups] == [
        ("sliding_window", 30),
        ("full_attention", 20),
    ]
    assert sum(group.block_bytes for group in groups) == sum(spec.page_bytes for spec in specs.values())
    assert all(group.block_size == 16 for group in groups)


def test_scene_39_the_larger_block_decides_where_a_hit_ends():
    bench = Bench([full(16), full(32)], 20)
    bench.run_one(tokens(80) + tokens(40, 1000))
    other = bench.run_one(tokens(80) + tokens(40, 2000))
    assert (other.cache.hit, other.cache.alignment, other.cache.never_seen) == (64, 16, 39)


# Scheduler


def flood(num_blocks: int, *, budget: int = 2048, **config) -> Bench:
    return Bench([full()], num_blocks, max_num_scheduled_tokens=budget, **config)


def add_flood(bench: Bench) -> list:
    return [bench.add(tokens(2048, 10_000 * i), f"r{i}", max_tokens=64) for i in range(40)]


@pytest.mark.parametrize("must_fit", [True, False])
def test_scene_30_prompts_that_can_never_fit_are_refused_when_they_come(must_fit):
    bench = flood(100, full_sequence_must_fit=must_fit)
    for i in range(40):
        with pytest.raises(PromptTooLongError, match=r"2,048 tokens.*1,600"):
            bench.add(tokens(2048, 10_000 * i), f"r{i}", max_tokens=64)
    assert not bench.scheduler.has_unfinished_requests()


def test_scene_30_whole_sequence_admission_runs_two_at_a_time_without_preemption():
    bench = flood(300)
    requests = add_flood(bench)
    most = 0
    while bench.scheduler.has_unfinished_requests():
        bench.step()
        most = max(most, bench.scheduler.num_running)
    assert all(request.num_output_tokens == 64 for request in requests)
    assert (most, bench.scheduler.stats.num_preemptions) == (2, 0)


def test_scene_30_without_whole_sequence_admission_all_finish_and_preemptions_are_counted():
    bench = flood(300, budget=512, full_sequence_must_fit=False)
    requests = add_flood(bench)
    bench.run()
    assert all(request.num_output_tokens == 64 for request in requests)
    assert bench.scheduler.stats.num_preemptions == sum(request.num_preemptions for request in requests)
    assert bench.scheduler.stats.num_preemptions > 0


def test_scene_31_the_budget_is_filled_running_first():
    bench = Bench([full()], 400, max_num_scheduled_tokens=1024)
    for i in range(3):
        bench.add(tokens(800, 1000 * i), f"r{i}", max_tokens=10)
    for _ in range(3):
        bench.step()
    assert bench.scheduled() == [[800, 224], [1, 576, 447], [1, 1, 353]]


def test_scene_31_the_threshold_splits_long_prefills():
    bench = Bench([full()], 400, max_num_scheduled_tokens=1024, long_prefill_token_threshold=512)
    for i in range(3):
        bench.add(tokens(800, 1000 * i), f"r{i}", max_tokens=10)
    for _ in range(2):
        bench.step()
    assert bench.scheduled() == [[512, 512], [288, 288, 448]]


def test_scene_33_the_last_to_run_is_preempted_first():
    bench = Bench([full()], 8, full_sequence_must_fit=False, watermark=0)
    first = bench.add(tokens(60), "first", max_tokens=20)
    last = bench.add(tokens(60, 100), "last", max_tokens=20)
    while last.num_preemptions == 0:
        bench.step()
    assert (last.num_computed_tokens, bench.scheduler.waiting[0], first.num_preemptions) == (0, last, 0)
    assert last.num_tokens == 65
    bench.run()
    assert (first.num_output_tokens, last.num_output_tokens) == (20, 20)


@pytest.mark.parametrize("num_prompt_tokens", [16 * 9, 16 * 10])
def test_scene_38_a_prompt_of_the_capacity_runs_and_a_longer_one_does_not_stop_the_queue(num_prompt_tokens):
    bench = Bench([full()], 10)
    with pytest.raises(PromptTooLongError, match="shorten the prompt"):
        bench.add(tokens(16 * 10 + 1, 1000), "too long")
    request = bench.run_one(tokens(num_prompt_tokens), max_tokens=1000)
    assert request.num_output_tokens == 16 * 10 - num_prompt_tokens + 1
    assert (request.finish_reason, request.num_preemptions) == ("length", 0)
    check_invariants(bench.coordinator, [])
