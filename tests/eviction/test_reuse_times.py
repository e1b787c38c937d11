"""Chances of reuse: learned by class, and where nothing is known yet the most recent counts most."""

import pytest

from hybrid_engine.eviction.reuse_times import EVENTS_BETWEEN, ReuseTimes


def test_before_anything_is_known_the_rate_falls_with_the_age():
    times = ReuseTimes([1.0])
    rates = [times.rate(0, age) for age in (0.0, 1.0, 30.0, 1000.0, 1e9)]
    assert rates == sorted(rates, reverse=True)


def test_a_class_that_is_used_again_is_worth_more_than_one_that_is_not():
    times = ReuseTimes([1.0, 1.0])
    for _ in range(EVENTS_BETWEEN):
        times.note_use(0, 0.0, 10.0)
        times.note_end(1, 0.0, 10.0)
    assert times.rate(0, 1.0) > 20 * times.rate(1, 1.0)


def test_what_waits_for_a_tool_is_worth_more_as_the_answer_nears_and_less_afterwards():
    times = ReuseTimes([1.0])
    for _ in range(2 * EVENTS_BETWEEN):
        times.note_use(0, 0.0, 20.0)
    for _ in range(EVENTS_BETWEEN):
        times.note_end(0, 0.0, 1000.0)
    assert times.rate(0, 16.0) > times.rate(0, 1.0) > times.rate(0, 100.0)


def test_one_that_joined_a_class_late_is_not_taken_to_have_been_passed_over_before():
    early, late = ReuseTimes([1.0]), ReuseTimes([1.0])
    for _ in range(EVENTS_BETWEEN // 2):
        for times, from_age in ((early, 0.0), (late, 50.0)):
            times.note_use(0, 0.0, 10.0)
            times.note_end(0, from_age, 60.0)
    assert late.rate(0, 0.0) > early.rate(0, 0.0)


def test_what_is_expected_counts_until_enough_was_seen():
    times = ReuseTimes([1.0, 3.0])
    assert times.rate(1, 5.0) == pytest.approx(3 * times.rate(0, 5.0))
    for _ in range(EVENTS_BETWEEN):
        times.note_use(0, 0.0, 5.0)
        times.note_end(1, 0.0, 5.0)
    assert times.rate(1, 5.0) < times.rate(0, 5.0)
