"""How soon checkpoints of a class are used again, learned while it goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

MIN_SECONDS = 0.125
NUM_AGES = 48
"""Ages are counted in half octaves from MIN_SECONDS: up to about 12 days."""
PRIOR = 4.0
"""A class is taken to be like all classes together until about so many of its checkpoints have come to an age."""
FIRST_EVENTS = 32
EVENTS_BETWEEN = 256
"""Uses and ends after which what was learned is taken in; at first sooner."""
FORGETTING = 0.01
"""What counts less, each time."""

_EDGES = np.concatenate([[0.0], MIN_SECONDS * 2 ** (np.arange(NUM_AGES) / 2)])


class ReuseTimes:
    """For each class of checkpoints and each age since the last use: the best rate of reuse to be had by keeping one.

    Ages are censored data: many checkpoints are given up, or change their class, before anybody uses them again. The
    chance to be used at an age, among those that came to it, is the estimate of Kaplan and Meier (1958). From it
    follows, for each age, the largest over all times t of

        (chance of a use within t) / (mean time until that use, or t)

    which is Gittins' index (1979) of keeping a checkpoint that pays once, for rent that runs all the time.
    """

    def __init__(self, expected: Sequence[float]) -> None:
        """expected: by class, how much likelier than usual a use is taken to be until enough was seen."""
        num_classes = len(expected)
        self._expected = np.array(expected)[:, None]
        self._uses = np.zeros((num_classes, NUM_AGES))
        self._came = np.zeros((num_classes, NUM_AGES + 1))
        """How many more came to an age than to the one before."""
        middles = (_EDGES[1:] + _EDGES[:-1]) / 2
        # Nothing is known: the rate falls with the age, and recency decides.
        self._rates = (self._expected / (MIN_SECONDS + middles)).tolist()
        self._num_events = 0
        self._next_events = FIRST_EVENTS

    def rate(self, class_index: int, age: float) -> float:
        """Return the best rate of reuse of a class at an age, uses a second."""
        return self._rates[class_index][_age_index(age)]

    def note_use(self, class_index: int, from_age: float, age: float) -> None:
        """Note that a checkpoint, of a class since from_age, was used at an age."""
        self._uses[class_index, _age_index(age)] += 1
        self.note_end(class_index, from_age, age)

    def note_end(self, class_index: int, from_age: float, age: float) -> None:
        """Note that a checkpoint, of a class since from_age, is no more of it at an age."""
        self._came[class_index, _age_index(from_age)] += 1
        self._came[class_index, _age_index(age) + 1] -= 1
        self._num_events += 1
        if self._num_events >= self._next_events:
            self._next_events += min(EVENTS_BETWEEN, self._num_events)
            self._take_in()

    def _take_in(self) -> None:
        at_risk = np.cumsum(self._came[:, :-1], axis=1)
        usual = (self._uses.sum(0) + 0.02) / (at_risk.sum(0) + 1.0)
        chance = (self._uses + PRIOR * np.minimum(usual * self._expected, 1)) / (at_risk + PRIOR)
        self._rates = _best_rates(np.minimum(chance, 0.95)).tolist()
        self._uses *= 1 - FORGETTING
        self._came *= 1 - FORGETTING


def _best_rates(chance: np.ndarray) -> np.ndarray:
    """Return Gittins' index by class and age. chance: to be used at an age, for those that came to it."""
    best = np.zeros_like(chance)
    widths = np.diff(_EDGES)
    for age in range(NUM_AGES):
        after = np.cumprod(1 - chance[:, age:], axis=1)
        before = np.concatenate([np.ones((len(chance), 1)), after[:, :-1]], axis=1)
        seconds = np.cumsum((before + after) / 2 * widths[age:], axis=1)
        best[:, age] = ((1 - after) / seconds).max(axis=1)
    return best


def _age_index(age: float) -> int:
    if age < MIN_SECONDS:
        return 0
    return min(NUM_AGES - 1, int(2 * math.log2(age / MIN_SECONDS)) + 1)
