"""`pin` and `fork` of the Python API: a prompt's prefix that is cached becomes one that stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_engine.pins import HeldPrefix
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler


@dataclass(eq=False, frozen=True, slots=True)
class Pin:
    """A prefix that stays cached until `LLM.unpin`, or until the cache is reset."""

    name: str
    token_ids: list[int]
    """What was pinned. A prompt that begins with these tokens, and goes on, is computed from num_tokens on."""
    num_tokens: int
    """How many of them need not be computed again."""
    cache_salt: str
    prefix: HeldPrefix


def pin_prefix(
    scheduler: Scheduler,
    token_ids: Sequence[int],
    *,
    name: str,
    cache_salt: str = "",
    max_model_len: int,
    min_tokens: int = 1,
) -> Pin | None:
    """Pin what is cached of a prompt; None: that is less than min_tokens.

    Raises RequestError when a request of max_model_len tokens would not fit beside all that is pinned.
    """
    coordinator, config = scheduler.coordinator, scheduler.config
    # A look-up leaves the last token out, for its logits: one more stands behind what is to be found.
    probe = Request(
        name,
        [*token_ids, 0],
        SamplingParams(max_tokens=1),
        hasher=coordinator.hasher,
        max_model_len=len(token_ids) + 2,
        cache_salt=cache_salt,
    )
    hit, tables = coordinator.look_up(probe)
    if hit.num_computed_tokens < min_tokens:
        return None
    chunk_tokens = config.max_num_scheduled_tokens * (1 + config.async_depth)
    longest = [
        manager.num_peak_blocks(max_model_len, chunk_tokens=chunk_tokens)
        + (config.draft_slots if manager.is_state else 0)
        for manager in coordinator.managers
    ]
    prefix = coordinator.pins.hold(hit, tables or [()] * len(longest), longest)
    return Pin(name, list(token_ids), prefix.num_tokens, cache_salt, prefix)
