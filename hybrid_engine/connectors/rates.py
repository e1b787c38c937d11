"""Fetch or recompute: what reading stored bytes takes, against what computing the tokens again takes."""

from __future__ import annotations

from collections.abc import Mapping

WEIGHT = 0.2
"""Of a new measurement in a running average."""
SHARE_OF_ONE_TIER = 0.9
"""A load says how fast a tier is when so much of it came from there."""
MIN_STEP_TOKENS = 32
"""A step of fewer tokens says little of how fast prompts are computed."""
FORGETTING = 1.02
"""A tier that was passed over is believed to be so much faster the next time: one slow hour isn't for ever."""


class FetchRates:
    """Running averages of each tier's bytes a second and of the prompt tokens computed in a second.

    What was never measured is tried: without a measurement fetching wins.
    """

    def __init__(self) -> None:
        self.tokens_per_second: float | None = None
        self.bytes_per_second: dict[str, float] = {}

    def note_load(self, num_bytes: Mapping[str, int], seconds: float) -> None:
        """Learn from a load of so many bytes from each tier."""
        total = sum(num_bytes.values())
        for tier, count in num_bytes.items():
            if total and seconds > 0 and count >= SHARE_OF_ONE_TIER * total:
                self.bytes_per_second[tier] = _mix(self.bytes_per_second.get(tier), total / seconds)

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step that computed so many tokens."""
        if num_tokens >= MIN_STEP_TOKENS and seconds > 0:
            self.tokens_per_second = _mix(self.tokens_per_second, num_tokens / seconds)

    def load_seconds(self, num_bytes: Mapping[str, int]) -> float:
        """Return what reading these bytes should take; 0 for a tier that was never measured."""
        known = self.bytes_per_second
        return sum(count / known[tier] for tier, count in num_bytes.items() if tier in known)

    def is_worth_fetching(self, num_tokens: int, num_bytes: Mapping[str, int]) -> bool:
        """Return whether reading so many bytes is expected to be faster than computing so many tokens."""
        if self.tokens_per_second is None:
            return True
        return self.load_seconds(num_bytes) <= num_tokens / self.tokens_per_second

    def forget_a_little(self, num_bytes: Mapping[str, int]) -> None:
        """Believe the tiers that were just passed over to be a little faster."""
        for tier, count in num_bytes.items():
            if count and tier in self.bytes_per_second:
                self.bytes_per_second[tier] *= FORGETTING


def _mix(old: float | None, new: float) -> float:
    return new if old is None else (1 - WEIGHT) * old + WEIGHT * new
