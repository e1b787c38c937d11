"""Scores of answers, and intervals with known values."""

from __future__ import annotations

import pytest

from hybrid_engine.evals.metrics import all_found, any_found, bootstrap, clean, interval, whole_word_found, wilson


@pytest.mark.parametrize(
    ("answer", "share"), [("It is 12 and 345.", 1), ("345", 0.5), ("nothing", 0)], ids=["both", "one", "none"]
)
def test_all_found_is_the_share_of_the_references(answer, share):
    assert all_found(answer, ("12", "345")) == share


def test_references_are_found_whatever_their_case():
    assert all_found("the BLUE lamp", ("Blue",)) == any_found("in paris", ("Rome", "Paris")) == 1


def test_any_found_needs_one_of_the_references():
    assert any_found("London", ("Rome", "Paris")) == 0


@pytest.mark.parametrize(("answer", "score"), [("4071.", 1), ("40712", 0), ("14071", 0), ("the code: 4071", 1)])
def test_a_whole_word_is_found_and_no_part_of_one(answer, score):
    assert whole_word_found(answer, ("4071",)) == score


def test_control_characters_of_an_answer_become_line_ends():
    assert clean(" a\tb\x00") == "a\nb"


@pytest.mark.parametrize(
    ("num_right", "num_all", "low", "high"),
    # Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
    [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0, 0.1611), (1, 29, 0.0061, 0.1718)],
)
def test_wilson_intervals_are_the_published_ones(num_right, num_all, low, high):
    found = wilson(num_right, num_all)
    assert (found.low, found.high) == pytest.approx((low, high), abs=5e-5)


def test_a_bootstrap_interval_holds_the_mean_and_narrows_with_more_values():
    few, many = bootstrap([0.2, 0.5, 0.9] * 3), bootstrap([0.2, 0.5, 0.9] * 100)
    assert few.low < many.low < sum((0.2, 0.5, 0.9)) / 3 < many.high < few.high
    assert bootstrap([0.2, 0.5, 0.9] * 3) == few


@pytest.mark.parametrize(("scores", "method"), [([0, 1.0, 1], "Wilson"), ([0, 0.5, 1], "bootstrap")])
def test_the_interval_fits_the_kind_of_score(scores, method):
    assert interval(scores).method == method
