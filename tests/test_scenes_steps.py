"""The scenes of docs/SCENARIOS.md about steps in flight, drafts and priorities, by their numbers."""

import pytest
from bookkeeping import Bench, expected_stream, full, hit_tokens, sliding, state
from fakes import FakeDrafter

from hybrid_engine.request import RequestStatus


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


# Steps in flight


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


# Drafts


def test_scene_32_unused_draft_slots_take_input_positions():
    bench = Bench([full()], 60, max_num_batched_tokens=16, draft_slots=3, drafter=FakeDrafter())
    for i in range(6):
        bench.add(tokens(2, 10 * i), f"r{i}")
    bench.step()
    assert bench.scheduled() == [[2, 2, 2]]


def test_scene_36_a_rejected_draft_is_taken_back():
    class OneRight(FakeDrafter):
        def propose(self, requests, max_drafts):
            return [
                (*guess[:1], *[(token + 1) % 50 for token in guess[1:]])
                for guess in super().propose(requests, max_drafts)
            ]

    bench = Bench([full(), state()], 20, draft_slots=3, drafter=OneRight())
    request = bench.add(tokens(10), max_tokens=50)
    bench.step()
    assert (request.num_computed_tokens, request.num_tokens) == (10, 11)
    bench.launch()
    assert bench.plans[-1].num_scheduled_tokens == (4,)
    assert request.num_computed_tokens + request.num_in_flight_tokens == 14
    bench.take_in()
    assert (request.num_computed_tokens, request.num_tokens) == (12, 13)
    bench.run()
    assert bench.streams["r"] == expected_stream(tokens(10), 50)


def test_scene_36_drafts_never_pass_max_tokens_and_the_state_is_kept_at_the_end():
    bench = Bench([full(), state()], 20, draft_slots=3, drafter=FakeDrafter(), checkpoint_interval=0)
    request = bench.run_one(tokens(10), max_tokens=3)
    assert (request.num_tokens, bench.streams["r"]) == (13, expected_stream(tokens(10), 3))
    assert hit_tokens(bench.coordinator, [*request.token_ids, 7]) == 12


def test_a_stop_token_among_accepted_drafts_cuts_the_answer_and_no_state_beyond_it_is_kept():
    stream = expected_stream(tokens(10), 30)
    bench = Bench([full(), state()], 20, draft_slots=3, drafter=FakeDrafter(), checkpoint_interval=0)
    request = bench.run_one(tokens(10), max_tokens=30, stop_token_ids=(stream[2],))
    assert bench.streams["r"] == stream[: stream.index(stream[2]) + 1]
    # All three drafts were accepted: the state had consumed 14 tokens.
    assert hit_tokens(bench.coordinator, [*request.token_ids, *stream[3:], 7]) == 10


def test_right_drafts_save_steps():
    bench = Bench([full(), sliding(20), state()], 30, draft_slots=3, drafter=FakeDrafter())
    bench.run_one(tokens(30), max_tokens=41)
    assert len(bench.plans) == 1 + 10
    assert bench.scheduler.drafting.num_accepted == bench.scheduler.drafting.num_drafts == 30


def test_nobody_misses_a_step_for_anothers_drafts():
    bench = Bench([full()], 40, max_num_scheduled_tokens=8, draft_slots=5, drafter=FakeDrafter())
    for i in range(4):
        bench.add(tokens(2, 10 * i), f"r{i}", max_tokens=20)
    bench.step()
    for _ in range(3):
        bench.step()
        assert bench.plans[-1].num_scheduled_tokens == (5, 1, 1, 1)


def test_nobody_is_preempted_for_drafts():
    bench = Bench([full(), state()], [10, 2], draft_slots=3, drafter=FakeDrafter(), checkpoint_interval=0)
    for i in range(2):
        bench.add(tokens(20, 100 * i), f"r{i}", max_tokens=20)
    bench.run()
    assert bench.scheduler.stats.num_preemptions == 0
    assert bench.streams["r1"] == expected_stream(tokens(20, 100), 20)


def test_while_drafts_are_in_flight_others_go_on():
    bench = Bench([full()], 40, async_depth=1, draft_slots=2, drafter=FakeDrafter())
    bench.add(tokens(20), "a", max_tokens=60)
    bench.step()
    bench.add(tokens(20, 100), "b", max_tokens=60)
    bench.run()
    assert {plan.request_ids for plan in bench.plans} >= {("a",), ("b",)}
    assert bench.scheduler.drafting.num_accepted >= 70  # about two of three tokens of each answer


def test_a_request_for_which_there_is_no_guess_runs_ahead():
    bench = Bench([full()], 40, async_depth=1, draft_slots=2, drafter=FakeDrafter(guesses=0.0))
    bench.add(tokens(20), max_tokens=60)
    bench.launch()
    assert not bench.launch()
    bench.take_in()
    assert bench.launch()
    assert bench.launch()


def test_drafts_are_not_found_before_they_are_accepted():
    bench = Bench([full()], 20, draft_slots=3, drafter=FakeDrafter())
    request = bench.add(tokens(30), max_tokens=20)
    bench.step()
    bench.launch()
    assert request.num_computed_tokens + request.num_in_flight_tokens == 34
    assert len(bench.coordinator.managers[0].pool.cached) == 1
    bench.take_in()
    assert len(bench.coordinator.managers[0].pool.cached) == 2


# Order and fairness


def run_flood(depth: int, **config) -> Bench:
    bench = Bench([full()], 300, max_num_scheduled_tokens=2048, async_depth=depth, **config)
    for i in range(40):
        bench.add(tokens(2048, 10_000 * i), f"r{i}", max_tokens=64)
    return bench


@pytest.mark.parametrize("depth", [0, 2])
def test_scene_30_all_wait_while_others_hold_the_blocks_and_all_finish_afterwards(depth):
    bench = run_flood(depth)
    bench.hold(200 * 16)
    for _ in range(5):
        assert not bench.launch()
    assert bench.scheduler.num_waiting == 40
    bench.free_strangers()
    bench.run()
    assert all(len(stream) == 64 for stream in bench.streams.values())
    assert (len(bench.streams), bench.scheduler.stats.num_preemptions) == (40, 0)


def test_scene_33_by_priority_the_least_important_is_preempted_even_if_it_came_first():
    bench = Bench([full()], 8, full_sequence_must_fit=False, watermark=0, policy="priority")
    low = bench.add(tokens(60), "low", max_tokens=20, priority=5)
    high = bench.add(tokens(60, 100), "high", max_tokens=20, priority=1)
    while bench.scheduler.stats.num_preemptions == 0:
        bench.step()
    assert (low.num_preemptions, high.num_preemptions, bench.scheduler.waiting[0]) == (1, 0, low)


def test_scene_33_among_equal_priorities_the_last_to_arrive_is_preempted():
    bench = Bench([full()], 8, full_sequence_must_fit=False, watermark=0, policy="priority")
    first = bench.add(tokens(60), "first", max_tokens=20, priority=3)
    last = bench.add(tokens(60, 100), "last", max_tokens=20, priority=3)
    while bench.scheduler.stats.num_preemptions == 0:
        bench.step()
    assert (first.num_preemptions, last.num_preemptions) == (0, 1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_scene_37_a_more_important_request_runs_in_the_next_step(depth):
    bench = Bench([full()], 40, max_num_seqs=2, policy="priority", async_depth=depth)
    for name in ("a", "b"):
        bench.add(tokens(20, 100 * ord(name)), name, max_tokens=30, priority=5)
    for _ in range(4):
        bench.step()
    bench.add(tokens(20, 900), "urgent", max_tokens=5, priority=0)
    bench.launch()
    assert [request.request_id for request in bench.plans[-1].started] == ["urgent"]
    assert bench.scheduler.stats.preemptions == {"blocks": 0, "priority": 1, "asked": 0}
    bench.run()
    assert bench.streams["b"] == expected_stream(tokens(20, 100 * ord("b")), 30)


def test_a_more_important_request_gets_the_blocks_of_less_important_ones():
    bench = Bench([full()], 10, policy="priority", watermark=0)
    bench.add(tokens(120), "low", max_tokens=30, priority=5)
    bench.step()
    bench.add(tokens(60, 900), "urgent", max_tokens=5, priority=0)
    bench.step()
    bench.step()
    assert bench.scheduler.running[0].request_id == "urgent"
    assert bench.scheduler.stats.preemptions["priority"] == 1
    bench.run()
    assert bench.streams["low"] == expected_stream(tokens(120), 30)


@pytest.mark.parametrize(("ageing_steps", "is_served"), [(10, True), (0, False)])
def test_a_request_that_has_waited_long_comes_before_more_important_ones_that_came_late(ageing_steps, is_served):
    bench = Bench([full()], 40, max_num_seqs=1, policy="priority", ageing_steps=ageing_steps)
    bench.add(tokens(20), "high0", max_tokens=4, priority=0)
    bench.step()
    bench.add(tokens(20, 100), "low", max_tokens=2, priority=2)
    for i in range(1, 60):
        bench.add(tokens(20, 200 * i), f"high{i}", max_tokens=4, priority=0)
        for _ in range(4):
            bench.step()
    assert ("low" in bench.streams) == is_served


def test_small_requests_overtake_one_without_a_place_for_a_bounded_number_of_steps():
    bench = Bench([full()], 20, max_overtaken_steps=3, watermark=0, max_num_seqs=8)
    bench.add(tokens(100), "first", max_tokens=60)
    bench.step()
    bench.add(tokens(250, 1000), "large", max_tokens=5)
    for i in range(12):
        bench.add(tokens(8, 2000 + 10 * i), f"small{i}", max_tokens=3)
        bench.step()
    large = bench.scheduler.requests["large"]
    assert (large.num_overtaken, bench.scheduler.stats.num_overtaken) == (3, 3)
    assert [f"small{i}" in bench.streams for i in range(5)] == [True, True, True, False, False]
    bench.run()
    assert bench.streams["large"] == expected_stream(tokens(250, 1000), 5)


def test_a_request_without_a_place_is_not_looked_up_again_before_blocks_are_freed(monkeypatch):
    bench = Bench([full()], 20, watermark=0)
    bench.add(tokens(200), "first", max_tokens=40)
    bench.step()
    bench.add(tokens(200, 1000), "second", max_tokens=1)
    num_asked = []
    look_up = bench.coordinator.look_up
    monkeypatch.setattr(bench.coordinator, "look_up", lambda request: num_asked.append(1) or look_up(request))
    for _ in range(30):
        bench.step()
    assert len(num_asked) == 1
    bench.run()
    assert bench.streams["second"] == expected_stream(tokens(200, 1000), 1)


def test_a_request_without_a_place_is_looked_up_again_once_enough_blocks_were_freed():
    bench = Bench([full()], 20, watermark=0, enable_prefix_caching=False)
    bench.add(tokens(100), "short", max_tokens=5)
    bench.add(tokens(100, 1000), "long", max_tokens=60)
    bench.add(tokens(100, 2000), "waits", max_tokens=5)
    while "short" in bench.scheduler.requests:
        bench.step()
    bench.step()
    assert bench.plans[-1].request_ids == ("long", "waits")


def test_a_preemption_is_told_in_one_line(caplog):
    caplog.set_level("INFO", logger="hybrid_engine.scheduler")
    bench = Bench([full()], 8, full_sequence_must_fit=False, watermark=0)
    bench.add(tokens(60), "first", max_tokens=20)
    bench.add(tokens(60, 100), "last", max_tokens=20)
    bench.run()
    (line,) = [record.getMessage() for record in caplog.records if "preempted" in record.getMessage()]
    assert line.startswith("preempted request=last reason=blocks computed_tokens=64 in_flight_tokens=0")
