"""How an answer is scored, and how sure a mean of scores is."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Metric = Callable[[str, Sequence[str]], float]
"""From an answer and its references to a score from 0 to 1."""

Z_95 = 1.959963984540054
NUM_RESAMPLES = 2000


def all_found(answer: str, references: Sequence[str]) -> float:
    """Return the share of the references that the answer contains, whatever their case (RULER's string_match_all)."""
    return sum(reference.lower() in answer.lower() for reference in references) / len(references)


def any_found(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer contains one of the references, whatever their case (RULER's string_match_part)."""
    return float(any(reference.lower() in answer.lower() for reference in references))


def whole_word_found(answer: str, references: Sequence[str]) -> float:
    """Return 1 if the answer contains one of the references as a whole word: 71 is not in 4071."""
    return float(any(re.search(rf"(?<!\w){re.escape(each)}(?!\w)", answer, re.IGNORECASE) for each in references))


def clean(answer: str) -> str:
    """Return an answer as it is scored: control characters become line ends, as in RULER."""
    return re.sub(r"[\x00-\x1f]", "\n", answer.strip()).strip()


@dataclass(frozen=True, slots=True)
class Interval:
    """Where the mean lies with a confidence of 95 %."""

    low: float
    high: float
    method: str


def wilson(num_right: int, num_all: int) -> Interval:
    """Return Wilson's score interval of a share (E. B. Wilson, JASA 22, 1927): never empty, never beyond 0 or 1."""
    share, z2 = num_right / num_all, Z_95**2
    centre = share + z2 / (2 * num_all)
    half = Z_95 * math.sqrt(share * (1 - share) / num_all + z2 / (4 * num_all**2))
    scale = 1 + z2 / num_all
    # The ends are exact: rounding must not put the mean outside.
    low = 0.0 if num_right == 0 else (centre - half) / scale
    high = 1.0 if num_right == num_all else (centre + half) / scale
    return Interval(low, high, "Wilson")


def bootstrap(values: Sequence[float]) -> Interval:
    """Return the percentile bootstrap interval of a mean (B. Efron, Annals of Statistics 7, 1979); always the same."""
    rng = random.Random(len(values))
    means = sorted(math.fsum(rng.choices(values, k=len(values))) / len(values) for _ in range(NUM_RESAMPLES))
    return Interval(means[int(0.025 * NUM_RESAMPLES)], means[int(0.975 * NUM_RESAMPLES) - 1], "bootstrap")


def interval(scores: Sequence[float]) -> Interval:
    """Return Wilson's interval where every score is 0 or 1, else the bootstrap's."""
    if all(score in (0, 1) for score in scores):
        return wilson(int(sum(scores)), len(scores))
    return bootstrap(scores)
