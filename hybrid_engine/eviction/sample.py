"""The checkpoint that is worth least among some drawn at random: for values that change while nothing happens.

What a checkpoint is worth changes with time and with its neighbours, so that no order of all of them stays right. Among
32 drawn evenly, the least is on average among the lowest 1/33 of all (the way of LHD: Beckmann et al., NSDI 2018).
"""

from __future__ import annotations

import random
from collections import OrderedDict

from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.eviction import EvictionPolicy

NUM_DRAWN = 32
SEED = 0


class SamplingPolicy(EvictionPolicy):
    """Spare checkpoints go first, in the order in which they became so; then the least of some drawn at random.

    Each event is O(1), naming a victim O(NUM_DRAWN). Draws come from a seed, so that a replay can be repeated.
    """

    num_drawn = NUM_DRAWN

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._candidates: list[Checkpoint] = []
        self._index_of: dict[Checkpoint, int] = {}
        self._spare: OrderedDict[Checkpoint, None] = OrderedDict()

    def record(self, checkpoint: Checkpoint) -> None:
        self._enter(checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        self._leave(checkpoint)
        self._enter(checkpoint)

    def thin(self, checkpoint: Checkpoint) -> None:
        self._leave(checkpoint)
        self._enter(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        self._leave(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        self._enter(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        self._leave(checkpoint)

    def next_victim(self) -> Checkpoint | None:
        if self._spare:
            return next(iter(self._spare))
        if not self._candidates:
            return None
        return self.least(self._draw())

    def least(self, drawn: list[Checkpoint]) -> Checkpoint:
        """Return the one of some checkpoints that is worth least."""
        raise NotImplementedError

    def _draw(self) -> list[Checkpoint]:
        candidates, count = self._candidates, len(self._candidates)
        if count <= self.num_drawn:
            return candidates
        # With repeats: the chance of one is small, and asking for none takes four times as long.
        draw = self._random.random
        return [candidates[int(draw() * count)] for _ in range(self.num_drawn)]

    def _enter(self, checkpoint: Checkpoint) -> None:
        if checkpoint.num_pins:
            return
        if checkpoint.is_spare:
            self._spare[checkpoint] = None
            return
        self._index_of[checkpoint] = len(self._candidates)
        self._candidates.append(checkpoint)

    def _leave(self, checkpoint: Checkpoint) -> None:
        self._spare.pop(checkpoint, None)
        index = self._index_of.pop(checkpoint, None)
        if index is None:
            return
        last = self._candidates.pop()
        if last is not checkpoint:
            self._candidates[index] = last
            self._index_of[last] = index
