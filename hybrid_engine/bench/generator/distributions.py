"""How the sizes and times of a workload are drawn: told by two quantiles, as published statistics tell them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from statistics import NormalDist

from hybrid_engine.errors import ConfigError

Z90 = NormalDist().inv_cdf(0.9)
"""A standard normal variable stays below it nine times of ten."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A log-normal distribution with this median and 90th percentile; all draws are `p50` where both are equal."""

    p50: float
    p90: float
    least: float = 0.0
    """Smaller draws become this."""
    most: float = math.inf
    """Larger draws become this."""

    def __post_init__(self) -> None:
        if not 0 < self.p50 <= self.p90 < math.inf:
            raise ConfigError(f"p50 is {self.p50:g} and p90 {self.p90:g}, must be 0 < p50 <= p90")
        if not 0 <= self.least <= self.most:
            raise ConfigError(f"least is {self.least:g} and most {self.most:g}, must be 0 <= least <= most")

    @property
    def sigma(self) -> float:
        """Standard deviation of the logarithm: log(draw) = log(p50) + sigma * z, and z90 belongs to p90."""
        return math.log(self.p90 / self.p50) / Z90

    def draw(self, rng: random.Random) -> float:
        """Return a number."""
        return min(max(rng.lognormvariate(math.log(self.p50), self.sigma), self.least), self.most)

    def draw_count(self, rng: random.Random, *, at_least: int = 1) -> int:
        """Return a whole number: of tokens, say."""
        return max(at_least, round(self.draw(rng)))
