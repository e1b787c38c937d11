"""The scenes of docs/SCENARIOS.md about steps in flight, by their numbers."""

import pytest
from bookkeeping import Bench, expected_stream, full, hit_tokens, sliding, state

from hybrid_engine.request import RequestStatus


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("chunk_tokens", [7, 50])
def test_scene_14_a_window_holds_one_more_chunk_for_each_step_in_flight(depth, chunk_tokens):
    bench = Bench([full(), sliding(32)], 64, async_depth=depth, max_num_scheduled_tokens=chunk_tokens)
    request = bench.add(tokens(300), max_tokens=60)
    most = 0
    while bench.scheduler.has_unfinished_requests():
        bench.step()
        if request.held is not None:
            most = max(most, sum(block.block_id != 0 for block in request.held.tables[1]))
    assert most <= -(-(32 + (1 + depth) * chunk_tokens) // 16) + 1


@pytest.mark.parametrize("depth", [1, 2])
def test_scene_24_a_step_in_flight_lands_before_its_victim_gives_its_blocks_back(depth):
    bench = Bench([full(), state()], [100, 10], checkpoint_interval=0, async_depth=depth)
    request = bench.add(tokens(100), max_tokens=250)
    while request.num_computed_tokens < 299:
        bench.step()
    bench.scheduler._preempt(request)
    assert (request.held is not None, bench.scheduler.num_in_flight_steps) == (True, depth)
    while request.status is not RequestStatus.RUNNING:
        bench.step()
    assert bench.plans[-1].started[0].num_computed_tokens in range(299, 300 + depth)
    bench.run()
    assert bench.streams["r"] == expected_stream(tokens(100), 250)


def test_scene_25_a_long_prompt_takes_what_decoding_requests_leave():
    bench = Bench([full()], 1000, max_num_scheduled_tokens=600, max_num_seqs=200)
    for i in range(100):
        bench.add(tokens(5, 100 * i), f"d{i}", max_tokens=40)
    bench.step()
    bench.add(tokens(5000, 50_000), "long", max_tokens=3)
    short = bench.add(tokens(20, 90_000), "short", max_tokens=3)
    bench.step()
    assert (bench.plans[-1].request_ids[-1], bench.plans[-1].num_scheduled_tokens[-1]) == ("long", 500)
    for _ in range(10):
        bench.step()
    assert short.num_output_tokens > 0


@pytest.mark.parametrize("depth", [1, 2])
def test_scene_28_admission_counts_one_more_chunk_of_window_for_each_step_in_flight(depth):
    # 16 tokens a step: window and a block take 4 blocks at most, each step in flight one more.
    needed = 4 + depth
    for num_window_blocks, is_admitted in ((needed - 1, False), (needed, True)):
        bench = Bench(
            [full(), sliding(32)],
            [40, num_window_blocks + 1],
            async_depth=depth,
            max_num_scheduled_tokens=16,
            watermark=0,
        )
        bench.hold(1)
        bench.add(tokens(256))
        bench.launch()
        assert bool(bench.plans) == is_admitted


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [8, 9, 11])
def test_scene_34_no_token_of_a_preempted_request_comes_twice_or_is_missing(depth, num_blocks):
    bench = Bench([full(), state()], [num_blocks, 8], async_depth=depth, full_sequence_must_fit=False, watermark=0)
    for i in range(3):
        bench.add(tokens(40, 100 * i), f"r{i}", max_tokens=30)
    bench.run()
    assert bench.scheduler.stats.num_preemptions > 0
    for i in range(3):
        assert bench.streams[f"r{i}"] == expected_stream(tokens(40, 100 * i), 30)


@pytest.mark.parametrize("depth", [1, 2])
def test_scene_35_a_request_is_not_computed_past_its_last_token(depth):
    bench = Bench([full()], 10, async_depth=depth)
    bench.add(tokens(10), max_tokens=2)
    while bench.launch():
        pass
    assert bench.scheduled() == [[10], [1]]
    bench.run()
    assert bench.scheduled() == [[10], [1]]
    assert bench.streams["r"] == expected_stream(tokens(10), 2)


@pytest.mark.parametrize("depth", [1, 2])
def test_what_is_computed_behind_a_stop_token_is_dropped(depth):
    stream = expected_stream(tokens(20), 30)
    bench = Bench([full(), state()], 20, async_depth=depth, checkpoint_interval=0)
    request = bench.add(tokens(20), max_tokens=30, stop_token_ids=(stream[4],))
    bench.run()
    assert bench.streams["r"] == stream[: stream.index(stream[4]) + 1]
    assert all(usage.num_held == 0 for usage in bench.coordinator.usage())
    # Depth 1: the state has consumed the stop token too. Depth 2: it has gone past it, and is of no use.
    assert hit_tokens(bench.coordinator, [*request.token_ids, 7]) == (request.num_tokens if depth == 1 else 20)


def test_a_key_is_found_only_when_its_step_has_finished():
    bench = Bench([full()], 20, async_depth=2, max_num_scheduled_tokens=32)
    bench.add(tokens(64), max_tokens=9)
    found = []
    for _ in range(3):
        bench.launch()
        found.append(hit_tokens(bench.coordinator, tokens(65)))
    for _ in range(2):
        bench.take_in()
        found.append(hit_tokens(bench.coordinator, tokens(65)))
    assert found == [0, 0, 0, 32, 64]


def test_an_aborted_request_holds_its_blocks_until_its_steps_have_finished():
    bench = Bench([full(), state()], [20, 8], async_depth=2)
    bench.add(tokens(64), "a", max_tokens=30)
    bench.launch()
    bench.launch()
    bench.scheduler.abort_request("a")
    held = [[usage.num_held for usage in bench.coordinator.usage()]]
    assert not bench.scheduler.has_unfinished_requests()
    for _ in range(2):
        assert bench.take_in() == []
        held.append([usage.num_held for usage in bench.coordinator.usage()])
    assert [any(counts) for counts in held] == [True, True, False]
    assert hit_tokens(bench.coordinator, tokens(65)) == 64


def test_nobody_else_is_preempted_while_a_victims_blocks_are_about_to_come_back():
    bench = Bench([full()], 12, async_depth=2, full_sequence_must_fit=False, watermark=0)
    for i in range(3):
        bench.add(tokens(60, 100 * i), f"r{i}", max_tokens=40)
    while not bench.scheduler.stats.num_preemptions:
        bench.step()
    victim = next(request for request in bench.scheduler.holders() if request.status is RequestStatus.PREEMPTED)
    while victim.held is not None:
        assert bench.scheduler.stats.num_preemptions == 1
        bench.step()
    bench.run()


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_preemption_at_every_possible_step_changes_no_stream(depth):
    for step in range(1, 62):
        bench = Bench([full(), sliding(24), state()], 30, async_depth=depth, checkpoint_interval=16)
        request = bench.add(tokens(50), max_tokens=60)
        for _ in range(step):
            bench.step()
        if request.status is RequestStatus.RUNNING:
            bench.scheduler._preempt(request)
        bench.run()
        assert bench.streams["r"] == expected_stream(tokens(50), 60)


def test_nobody_waits_for_a_state_that_a_launched_step_has_passed():
    bench = Bench([full(), state()], [100, 10], checkpoint_interval=0, async_depth=1)
    bench.add(tokens(256), "a", max_tokens=9)
    bench.launch()
    bench.add([*tokens(256), *tokens(50, 5000)], "b")
    bench.launch()
    assert bench.plans[1].request_ids == ("a", "b")


def test_a_long_chunk_leaves_a_token_to_each_request_behind_it():
    bench = Bench([full()], 100, policy="priority", max_num_scheduled_tokens=32)
    for i in range(3):
        bench.add(tokens(5, 100 * i), f"low{i}", max_tokens=20, priority=1)
    bench.step()
    bench.add(tokens(500, 1000), "long", priority=0)
    for _ in range(4):
        bench.step()
    assert [list(plan.num_scheduled_tokens) for plan in bench.plans[2:]] == [[29, 1, 1, 1]] * 3
