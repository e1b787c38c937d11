"""Plain recency."""

from __future__ import annotations

from hybrid_engine.eviction.heap import ValueHeap
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.eviction import EvictionPolicy


class LruPolicy(EvictionPolicy):
    """Spare checkpoints go first, in the order in which they became so; then the one whose last use is longest ago."""

    def __init__(self) -> None:
        self._heap = ValueHeap()

    def record(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def thin(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        self._heap.discard(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        self._heap.discard(checkpoint)

    def next_victim(self) -> Checkpoint | None:
        least = self._heap.least()
        return least[0] if least else None

    def _put(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.num_pins:
            self._heap.put(checkpoint, (not checkpoint.is_spare, checkpoint.last_event))
