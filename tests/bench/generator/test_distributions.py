"""Distributions told by two quantiles have them."""

import random

import numpy as np
import pytest

from hybrid_engine.bench.generator.distributions import LogNormal
from hybrid_engine.errors import ConfigError


def test_draws_have_the_quantiles_that_were_asked_for():
    rng = random.Random(0)
    draws = [LogNormal(713, 4206).draw(rng) for _ in range(20_000)]
    # The standard error of the 90th percentile is 2 % at this many draws.
    assert np.quantile(draws, [0.5, 0.9]) == pytest.approx([713, 4206], rel=0.06)


def test_equal_quantiles_leave_nothing_to_chance():
    assert LogNormal(600, 600).draw(random.Random(1)) == pytest.approx(600)


def test_draws_stay_within_the_limits():
    rng, narrow = random.Random(0), LogNormal(10, 100, least=5, most=20)
    draws = {narrow.draw(rng) for _ in range(200)}
    assert (min(draws), max(draws)) == (5, 20)


def test_a_count_is_whole_and_never_none():
    rng = random.Random(0)
    assert {LogNormal(0.1, 0.2).draw_count(rng) for _ in range(50)} == {1}


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"p50": 0, "p90": 1}, "p50 is 0 and p90 1, must be 0 < p50 <= p90"),
        ({"p50": 2, "p90": 1}, "p50 is 2 and p90 1"),
        ({"p50": 1, "p90": 1, "least": 3, "most": 2}, "least is 3 and most 2"),
    ],
)
def test_what_is_no_distribution_is_refused(values, named):
    with pytest.raises(ConfigError, match=named):
        LogNormal(**values)
