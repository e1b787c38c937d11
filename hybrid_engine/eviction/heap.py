"""Checkpoints by what they are worth, the least first."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Any

from hybrid_engine.groups.checkpoints import Checkpoint


class ValueHeap:
    """A heap whose entries can be changed and taken out: O(log n) amortised each.

    Changed entries stay inside until they come up or are too many; only the last one of a checkpoint counts. Equal
    values leave in the order in which they were put in.
    """

    def __init__(self) -> None:
        self._entries: list[tuple[Any, int, Checkpoint]] = []
        self._current: dict[Checkpoint, int] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._current)

    def __contains__(self, checkpoint: Checkpoint) -> bool:
        return checkpoint in self._current

    def put(self, checkpoint: Checkpoint, value: Any) -> None:
        """Set what a checkpoint is worth: anything that can be compared."""
        number = next(self._numbers)
        self._current[checkpoint] = number
        heapq.heappush(self._entries, (value, number, checkpoint))
        if len(self._entries) > 2 * len(self._current) + 64:
            self._entries = [entry for entry in self._entries if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._entries)

    def discard(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out, if it is inside."""
        self._current.pop(checkpoint, None)

    def least(self) -> tuple[Checkpoint, Any] | None:
        """Return the checkpoint that is worth least, and its value; None when there is none."""
        entries, current = self._entries, self._current
        while entries and current.get(entries[0][2]) != entries[0][1]:
            heapq.heappop(entries)
        return (entries[0][2], entries[0][0]) if entries else None
