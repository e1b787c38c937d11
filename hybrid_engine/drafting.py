"""Tokens guessed ahead: what the scheduler asks of a drafter, and when. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from hybrid_engine.request import Request


class Drafter(Protocol):
    """Guesses the tokens that follow; a step then computes them and keeps those that the model would have chosen."""

    def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Return up to max_drafts tokens for each request, all of whose tokens are known; () where it has no guess.

        Asked once a step. Not every proposal is run: budgets and memory may cut it.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of the drafts that a step ran were accepted."""
