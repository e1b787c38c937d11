"""The scenes of docs/SCENARIOS.md about order, fairness and priorities, by their numbers."""

import pytest
from bookkeeping import Bench, expected_stream, full


def tokens(count: int, start: int = 0) -> list[int]:
    return list(range(start, start + count))


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
