"""Fetch or recompute: which is chosen, and what is learnt."""

import pytest

from hybrid_engine.connectors.rates import FetchRates


def measured(*, bytes_per_second: float = 1000.0, tokens_per_second: float = 100.0) -> FetchRates:
    rates = FetchRates()
    rates.note_load({"host": int(bytes_per_second), "disk": 0}, 1.0)
    rates.note_step(int(tokens_per_second), 1.0)
    return rates


@pytest.mark.parametrize(("num_bytes", "wins"), [(999, True), (1000, True), (1001, False)])
def test_fetching_wins_while_it_takes_no_longer_than_computing(num_bytes, wins):
    # 100 tokens take one second to compute, 1000 bytes one second to fetch.
    assert measured().is_worth_fetching(100, {"host": num_bytes, "disk": 0}) is wins


def test_what_was_never_measured_is_tried():
    assert FetchRates().is_worth_fetching(1, {"host": 10**12})
    assert measured().is_worth_fetching(1, {"host": 0, "disk": 10**12})


def test_a_load_from_both_tiers_teaches_nothing_of_either():
    rates = FetchRates()
    rates.note_load({"host": 500, "disk": 500}, 1.0)
    assert rates.bytes_per_second == {}


def test_a_measurement_moves_the_average_by_a_fifth():
    rates = measured()
    rates.note_load({"host": 2000}, 1.0)
    assert rates.bytes_per_second["host"] == pytest.approx(1200)


def test_a_step_of_few_tokens_says_nothing_of_how_fast_prompts_are_computed():
    rates = measured()
    rates.note_step(1, 10.0)
    assert rates.tokens_per_second == 100


def test_a_tier_that_was_slow_once_is_tried_again_in_the_end():
    rates = measured(bytes_per_second=1)
    num_refused = 0
    while not rates.is_worth_fetching(100, {"host": 1000}):
        rates.forget_a_little({"host": 1000})
        num_refused += 1
    assert 100 < num_refused < 1000
