"""Tokens guessed ahead: what the scheduler asks of a drafter, and when. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.request import Request
from hybrid_engine.step_plan import RequestId, StepPlan, StepResult

RETRY_TOKENS = 8
"""Asynchronous: a request for which there was no guess runs ahead so many tokens before it waits to draft again."""


class Drafter(Protocol):
    """Guesses the tokens that follow; a step then computes them and keeps those that the model would have chosen."""

    def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Return up to max_drafts tokens for each request, all of whose tokens are known; () where it has no guess.

        Asked once a step. Not every proposal is run: budgets and memory may cut it.
        """

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of the drafts that a step ran were accepted."""


class Drafting:
    """Asks the drafter at the right moments and counts what comes of it."""

    def __init__(self, drafter: Drafter | None, config: SchedulerConfig) -> None:
        self._drafter = drafter if config.draft_slots else None
        self._config = config
        self.num_drafts = 0
        """Tokens guessed and computed."""
        self.num_accepted = 0
        """Of these, those that the model would have chosen."""

    def accept_request(self, request: Request) -> None:
        """Prepare a new request: one that drafts waits until all its tokens are known."""
        if self._drafter is not None:
            request.draft_after = 0

    def propose(self, running: Iterable[Request]) -> dict[RequestId, tuple[int, ...]]:
        """Return the guesses for the running requests that decode and whose tokens are all known."""
        if self._drafter is None:
            return {}
        ready = [request for request in running if _can_draft(request)]
        # The step that accepts all of them must not go past the request's end.
        rooms = [min(self._config.draft_slots, request.max_total_tokens - request.num_tokens - 1) for request in ready]
        proposed: dict[RequestId, tuple[int, ...]] = {}
        if not ready:
            return proposed
        for request, room, guess in zip(ready, rooms, self._drafter.propose(ready, rooms), strict=True):
            if guess and room > 0:
                proposed[request.request_id] = tuple(guess[:room])
            request.draft_after = 0 if guess else request.num_tokens + RETRY_TOKENS
        return proposed

    def take_in(self, plan: StepPlan, result: StepResult, requests: Sequence[Request]) -> list[int]:
        """Return how many tokens of each request stay computed: rejected drafts are taken back."""
        kept = list(plan.num_scheduled_tokens)
        for i, (request, drafts) in enumerate(zip(requests, plan.draft_token_ids, strict=True)):
            if drafts:
                num_accepted = len(result.sampled[request.request_id]) - 1
                num_rejected = len(drafts) - num_accepted
                kept[i] -= num_rejected
                request.num_in_flight_tokens -= num_rejected
                self.num_drafts += len(drafts)
                self.num_accepted += num_accepted
                if self._drafter is not None:
                    self._drafter.observe(request, len(drafts), num_accepted)
        return kept


def _can_draft(request: Request) -> bool:
    return (
        request.num_in_flight_tokens == 0
        and request.num_tokens - request.num_computed_tokens == 1
        and request.num_computed_tokens >= request.num_prompt_tokens
    )
