"""What fits in the cache memory: one function for the engine, for reports, and for whoever plans to buy a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.layout import MemoryLayout, share_memory
from hybrid_engine.groups.spec import Group


@dataclass(frozen=True)
class MemoryPlan:
    """The cache memory, which all groups share."""

    groups: tuple[Group, ...]
    layout: MemoryLayout
    memory_bytes: int
    """What was given."""

    @property
    def used_bytes(self) -> int:
        """Bytes that are allocated: all extents, and the null block."""
        return self.layout.num_bytes

    @property
    def capacity_tokens(self) -> int:
        """Most tokens of one request that fit when nothing else runs."""
        return self._coordinator.capacity_tokens

    def most_blocks(self) -> tuple[int, ...]:
        """Return how many blocks of each group would fit if it had all the memory."""
        return tuple(manager.pool.num_blocks for manager in self._coordinator.managers)

    def request_bytes(self, num_tokens: int, *, chunk_tokens: int = 1, num_states: int = 1) -> Mapping[int, int]:
        """Return the bytes that one request of num_tokens takes, by group.

        chunk_tokens: computed at a time, which windows hold beside themselves. num_states: its working state, those of
        its drafts, and the checkpoints that are to stay.
        """
        return {
            group.group_id: group.block_bytes * _num_blocks(manager, num_tokens, chunk_tokens, num_states)
            for group, manager in zip(self.groups, self._coordinator.managers, strict=True)
        }

    def num_requests(self, num_tokens: int, *, chunk_tokens: int = 1, num_states: int = 1) -> int:
        """Return how many requests of num_tokens fit at once, sharing nothing."""
        low, high = 0, 1
        while self._fits(high, num_tokens, chunk_tokens, num_states):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            is_fitting = self._fits(middle, num_tokens, chunk_tokens, num_states)
            low, high = (middle, high) if is_fitting else (low, middle)
        return low

    def needed_bytes(self, num_requests: int, num_tokens: int, *, num_states: int = 1) -> int:
        """Return the least memory in which so many requests of num_tokens fit at once, sharing nothing."""
        each = sum(self.request_bytes(num_tokens, num_states=num_states).values())
        low, high = 0, 2 * num_requests * each + len(self.groups) * self.layout.regions[0].extent_bytes
        while high - low > max(1, high >> 10):
            middle = (low + high) // 2
            try:
                fitting = plan_memory(self.groups, middle).num_requests(num_tokens, num_states=num_states)
            except CapacityError:
                fitting = 0
            low, high = (low, middle) if fitting >= num_requests else (middle, high)
        return high

    def _fits(self, num_requests: int, num_tokens: int, chunk_tokens: int, num_states: int) -> bool:
        each = [_num_blocks(manager, num_tokens, chunk_tokens, num_states) for manager in self._coordinator.managers]
        return self._coordinator.memory.find_shortage([num_requests * count for count in each]) is None

    @cached_property
    def _coordinator(self) -> Coordinator:
        return Coordinator(self.groups, self.layout)


def plan_memory(groups: Sequence[Group], memory_bytes: int) -> MemoryPlan:
    """Let groups share so many bytes. Raises CapacityError when that is less than one block for each of them takes."""
    return MemoryPlan(tuple(groups), share_memory(groups, memory_bytes), memory_bytes)


def _num_blocks(manager: GroupManager, num_tokens: int, chunk_tokens: int, num_states: int) -> int:
    return num_states if manager.is_state else manager.num_peak_blocks(num_tokens, chunk_tokens=chunk_tokens)
