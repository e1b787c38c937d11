"""What is replayed: model calls in sessions, each with its prompt, when it comes, and how long its answer is.

Readers of traces and the workload generator both make these. A prompt is known by its tokens, or by the identity of
its blocks alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """A prompt as tokens, in pieces that other prompts may share: a long conversation is kept once."""

    pieces: tuple[Sequence[int], ...]
    """A message each, say; one after the other they are the prompt. None is negative: those stand for unknown ones."""

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt."""
        return sum(map(len, self.pieces))

    def token_ids(self) -> list[int]:
        """Return the prompt's tokens."""
        return list(chain.from_iterable(self.pieces))


@dataclass(frozen=True, slots=True)
class BlockPrompt:
    """A prompt of which only the identity of its blocks is known."""

    num_tokens: int
    block_runs: tuple[tuple[int, int], ...]
    """(first id, how many ascending ids) in the prompt's order. An id names the whole prefix that ends with its block:
    where ids are equal, all before them is. What is left of the prompt is known by nothing."""
    block_tokens: int
    scope: str = ""
    """Equal ids stand for equal prefixes within one scope."""
    names_answer: bool = False
    """Whether the runs go on through the answer's full blocks; otherwise the session's next prompt shows them."""


Prompt = TokenPrompt | BlockPrompt


@dataclass(frozen=True, slots=True)
class WorkItem:
    """One model call."""

    session: str
    """Calls of one session follow each other: none is submitted before the answer to the one before has ended."""
    prompt: Prompt
    num_answer_tokens: int
    """At least 1."""
    answer: Sequence[int] | None = None
    """The answer's tokens; None: they are not known. Of a BlockPrompt the next prompt of the session shows them."""
    arrival_s: float | None = None
    """Seconds from the workload's beginning before which it isn't submitted; None: it is known by think_s, or not."""
    think_s: float | None = None
    """Seconds between the end of the session's call before and this one; None: arrival_s decides, if that is known."""
    message_boundaries: tuple[int, ...] = ()
    """Tokens of the prompt after which a message ends, ascending."""
    parent: str | None = None
    """Of a sub-agent's first call: the session that sent it. It starts think_s after the end of the parent's call
    parent_turn, and arrival_s doesn't count."""
    parent_turn: int = 0
    """Index of that call among the parent's."""
    waits_for: tuple[str, ...] = ()
    """Sessions that must have ended before it is submitted: sub-agents whose reports it shows."""
