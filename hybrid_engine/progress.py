"""What a finished step brings to a request: tokens, a reason to end, blocks that can be found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.request import Request


class RequestUpdate(NamedTuple):
    """What a step brought to one request."""

    request: Request
    new_token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass
class SchedulerStats:
    """Counters since the scheduler was made."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    """Rejected drafts counted."""
    preemptions: dict[str, int] = field(default_factory=lambda: {"blocks": 0, "priority": 0, "asked": 0})
    """By what they were made for."""
    num_recomputed_tokens: int = 0
    """Tokens computed a second time because a request was preempted."""
    num_overtaken: int = 0
    """Times that a request without a place saw others admitted before it, one for each step."""

    @property
    def num_preemptions(self) -> int:
        """Requests that had to give their blocks back."""
        return sum(self.preemptions.values())


def append_tokens(
    request: Request, token_ids: tuple[int, ...], runners_reason: str | None
) -> tuple[tuple[int, ...], str | None]:
    """Let an answer grow; return the tokens up to the one that ends it, and why it ended.

    runners_reason: why it ends with the last of them, if its grammar allows no other.
    """
    request.num_placeholders -= 1
    known, stops, most = request.token_ids, request.stop_token_ids, request.max_total_tokens
    for count, token_id in enumerate(token_ids, start=1):
        request.append_token(token_id)
        if token_id in stops and len(known) >= request.min_total_tokens:
            return token_ids[:count], "stop"
        if len(known) >= most:
            is_last = count == len(token_ids)
            return token_ids[:count], (runners_reason if is_last else None) or "length"
    return token_ids, runners_reason


def stop_token(request: Request, reason: str) -> int | None:
    """Return the stop token that ended an answer; None for an end-of-text token, and where none did."""
    last = request.token_ids[-1]
    is_stop_token = reason == "stop" and last in request.stop_token_ids and last not in request.eos_token_ids
    return last if is_stop_token else None


def keep_computed(coordinator: Coordinator, request: Request) -> None:
    """Make findable what a finished step has computed of a request."""
    held, num_computed = request.held, request.num_computed_tokens
    assert held is not None, f"{request} was computed without blocks"
    held.state_position = num_computed
    if num_computed >= held.register_position:
        # Drafts may have gone past the token that ended the answer.
        coordinator.cache_blocks(request, min(num_computed, len(request.token_ids)))
    if held.captures:
        coordinator.recorder.keep_captures(request)
    elif num_computed == request.num_prompt_tokens:
        coordinator.recorder.record_prompt_end(request)
