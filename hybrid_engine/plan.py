"""How the cache memory is shared out between the groups: one function, no setting.

Until memory flows between groups by itself, each has a pool of its own. This module decides their sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.managers import make_manager
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.groups.spec import ENDLESS, Group

TYPICAL_CHECKPOINTS = 4
"""Recurrent states that a typical request leaves behind: its prompt's end, its answer's, and where others part."""
STATE_SHARE = 0.1
"""Share of the memory that recurrent states get before anything else does: tokens that no state is left for are of no
use to the next prompt."""
TYPICAL_WINDOWS = 8
"""A typical request is taken to be this many times the largest window long, where there is one."""


@dataclass(frozen=True)
class MemoryPlan:
    """The pools of all groups."""

    groups: tuple[Group, ...]
    num_blocks: tuple[int, ...]
    """Usable blocks of each group; one more, the null block, is allocated."""
    memory_bytes: int
    """What was given."""

    @property
    def used_bytes(self) -> int:
        """Bytes of all blocks, the null blocks counted."""
        return sum((n + 1) * group.block_bytes for group, n in zip(self.groups, self.num_blocks, strict=True))


def plan_memory(
    groups: Sequence[Group],
    memory_bytes: int,
    *,
    max_model_len: int,
    max_num_seqs: int,
    max_num_scheduled_tokens: int,
    num_draft_slots: int = 0,
) -> MemoryPlan:
    """Size the pools so that one longest request fits, and beyond that equally many typical ones in every group.

    num_draft_slots: tokens guessed ahead of one request, each of which takes a recurrent state.
    Raises CapacityError, naming the bytes that would do, when not even the windows of one request fit.
    """
    longest = _num_blocks(groups, max_model_len, chunk_tokens=max_num_scheduled_tokens)
    longest = _with_states(groups, longest, num_draft_slots)
    most_states = 2 * max_num_seqs * (1 + num_draft_slots + TYPICAL_CHECKPOINTS)
    num_states = _num_states_first(groups, memory_bytes, most=most_states)
    longest = _with_states(groups, longest, num_states)
    typical = _num_blocks(groups, _typical_tokens(groups, max_model_len), chunk_tokens=max_num_scheduled_tokens)
    # A request runs on one recurrent state; its drafts and its checkpoints are what more of them are for.
    typical = _with_states(groups, typical, num_draft_slots + TYPICAL_CHECKPOINTS)
    null_bytes = sum(group.block_bytes for group in groups)
    spare = memory_bytes - null_bytes - _bytes(groups, longest)
    if spare < 0:
        return _plan_shorter_request(
            groups,
            memory_bytes,
            max_model_len=max_model_len,
            chunk_tokens=max_num_scheduled_tokens,
            num_states=num_states,
        )
    share = spare / _bytes(groups, typical)
    # More than twice what all requests together can hold is of no use.
    num_blocks = [
        min(base + int(share * count), 2 * max_num_seqs * max(base, count))
        for base, count in zip(longest, typical, strict=True)
    ]
    return MemoryPlan(tuple(groups), tuple(num_blocks), memory_bytes)


def _plan_shorter_request(
    groups: Sequence[Group], memory_bytes: int, *, max_model_len: int, chunk_tokens: int, num_states: int
) -> MemoryPlan:
    """The longest request doesn't fit: plan for the longest that does.

    Its chunks stay as large as they may be, unless not even a request of one such chunk fits: windows hold a chunk
    beside themselves, and small chunks make every request slow.
    """
    block_size = max([group.block_size for group in groups if group.block_size != ENDLESS], default=1)
    null_bytes = sum(group.block_bytes for group in groups)

    def num_blocks(num_tokens: int, chunk: int) -> list[int]:
        return _with_states(groups, _num_blocks(groups, num_tokens, chunk_tokens=chunk), num_states)

    def needed_bytes(num_tokens: int, chunk: int) -> int:
        return null_bytes + _bytes(groups, num_blocks(num_tokens, chunk))

    if needed_bytes(block_size, block_size) > memory_bytes:
        num_states = 0

    if needed_bytes(block_size, block_size) > memory_bytes:
        raise CapacityError(
            f"the cache memory is {memory_bytes:,} bytes, one block of {block_size} tokens in every group takes "
            f"{needed_bytes(block_size, block_size):,}: give at least that much"
        )
    chunk = max(chunk_tokens, block_size)
    while chunk > block_size and needed_bytes(chunk, chunk) > memory_bytes:
        chunk = max(chunk // 2, block_size)
    low, high = chunk, max(max_model_len, chunk)
    if needed_bytes(high, chunk) <= memory_bytes:
        low = high
    while high - low > block_size:
        middle = (low + high) // 2
        low, high = (middle, high) if needed_bytes(middle, chunk) <= memory_bytes else (low, middle)
    return MemoryPlan(tuple(groups), tuple(num_blocks(low, chunk)), memory_bytes)


def _typical_tokens(groups: Sequence[Group], max_model_len: int) -> int:
    windows = [window for group in groups if (window := getattr(group.spec, "window", 0))]
    return min(max_model_len, TYPICAL_WINDOWS * max(windows)) if windows else max_model_len


def _num_blocks(groups: Sequence[Group], num_tokens: int, *, chunk_tokens: int) -> list[int]:
    return [
        make_manager(group.spec, BlockPool(0), match_unit_tokens=group.block_size).num_peak_blocks(
            num_tokens, chunk_tokens=chunk_tokens
        )
        for group in groups
    ]


def _num_states_first(groups: Sequence[Group], memory_bytes: int, *, most: int) -> int:
    """Return how many recurrent states, of each group of them, a share of the memory holds."""
    state_bytes = sum(group.block_bytes for group in groups if group.block_size == ENDLESS)
    return min(most, int(STATE_SHARE * memory_bytes) // state_bytes) if state_bytes else 0


def _with_states(groups: Sequence[Group], num_blocks: Sequence[int], num_states: int) -> list[int]:
    """Add recurrent states where a block is one."""
    return [
        count + (num_states if group.block_size == ENDLESS else 0)
        for group, count in zip(groups, num_blocks, strict=True)
    ]


def _bytes(groups: Sequence[Group], num_blocks: Sequence[int]) -> int:
    return sum(group.block_bytes * count for group, count in zip(groups, num_blocks, strict=True))
