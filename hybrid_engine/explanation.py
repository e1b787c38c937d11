"""Why a prompt hit as far as it did: each of its tokens is attributed once, and the parts add up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """The tokens of one prompt (after a preemption: of all known tokens), by what became of them."""

    num_prompt_tokens: int
    hit: int
    """Found in the cache, not computed."""
    never_seen: int
    """Of no prefix that was known."""
    evicted: int
    """Known before, given up for lack of memory (as long as the key is remembered)."""
    missing_state: int
    """The groups that keep everything had them, but no recurrent state was there to go on from."""
    missing_window: int
    """The groups that keep everything had them, but a window was not there to go on from."""
    alignment: int
    """Known, but a hit ends only where blocks of all groups end, and before the last token."""
    disabled: int = 0
    """The cache was not read: it is off, or the request asked so."""
    external: int = 0
    """Brought by a connector, not computed."""

    LAST = 1
    """The last token is always computed, for its logits."""

    def __post_init__(self) -> None:
        parts = self.hit + self.external + self.LAST + self.num_missed
        assert parts == self.num_prompt_tokens, f"{self} adds up to {parts}"

    @property
    def num_missed(self) -> int:
        """Tokens computed, the last one not counted."""
        return sum(self.reasons().values())

    @property
    def num_computed(self) -> int:
        """Tokens computed, the last one counted."""
        return self.num_prompt_tokens - self.hit - self.external

    def reasons(self) -> dict[str, int]:
        """Return the tokens missed, by reason."""
        return {
            "never_seen": self.never_seen,
            "evicted": self.evicted,
            "missing_state": self.missing_state,
            "missing_window": self.missing_window,
            "alignment": self.alignment,
            "disabled": self.disabled,
        }

    def __str__(self) -> str:
        missed = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in self.reasons().items() if count)
        brought = f" + {self.external} external" if self.external else ""
        return f"{self.num_prompt_tokens} = {self.hit} hit{brought} + {self.LAST} last" + (
            f" + {missed}" if missed else ""
        )


def explain_disabled(num_tokens: int) -> CacheExplanation:
    """Explain a prompt for which the cache was not read."""
    return CacheExplanation(num_tokens, 0, 0, 0, 0, 0, 0, disabled=num_tokens - CacheExplanation.LAST)


def explain(
    *, num_tokens: int, hit: int, resumable: int, kept: int, seen: int, with_state: int | None = None
) -> CacheExplanation:
    """Attribute each token between the hit and the last one to the first reason that holds.

    num_tokens: the prompt's. hit: tokens found. with_state: the last position at which all but the windows could go on;
    None: where no group has states. resumable: the last position at which the groups that keep everything
    could go on. kept: end of what they hold, evicted tokens excluded. seen: end of the prefix that was known.
    hit <= with_state <= resumable <= kept <= seen, but for seen and kept counting at most to the last token.
    """
    last = num_tokens - CacheExplanation.LAST
    bounds = [hit]
    for position in (resumable if with_state is None else with_state, resumable, kept, seen, last):
        bounds.append(min(max(position, bounds[-1]), last))
    window, state, alignment, evicted, never_seen = (end - start for start, end in pairwise(bounds))
    return CacheExplanation(num_tokens, hit, never_seen, evicted, state, window, alignment)


BY_POSITION = ("missing_window", "missing_state", "alignment", "evicted", "never_seen", "disabled")
"""The reasons in the order in which their tokens follow the hit."""


def with_external(explanation: CacheExplanation, num_external_tokens: int) -> CacheExplanation:
    """Attribute the tokens right behind the hit to a connector instead of the reasons for which they were missed."""
    left, parts = num_external_tokens, {}
    for name in BY_POSITION:
        count = getattr(explanation, name)
        parts[name] = count - min(left, count)
        left -= count - parts[name]
    return replace(explanation, external=num_external_tokens - left, **parts)


def with_shorter_hit(explanation: CacheExplanation, num_tokens: int) -> CacheExplanation:
    """Explain a hit of which less could be used."""
    lost = explanation.hit - num_tokens
    return replace(explanation, hit=num_tokens, alignment=explanation.alignment + lost) if lost else explanation
