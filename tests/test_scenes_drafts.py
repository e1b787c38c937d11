"""The scenes of docs/SCENARIOS.md about drafts, by their numbers."""

from bookkeeping import Bench, expected_stream, full, hit_tokens, sliding, state
from fakes import FakeDrafter


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


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
