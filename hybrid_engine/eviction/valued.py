"""Our own: the checkpoint goes that is worth least for each byte that giving it up would free.

    value = chance of reuse a second x seconds to rebuild it / bytes that only it holds

Chances are learned by classes of checkpoints, see `ReuseTimes`: what it was laid for, how often it was used, and
whether the conversation has gone on behind it, on one way or on several.
"""

from __future__ import annotations

from hybrid_engine.eviction.reuse_times import ReuseTimes
from hybrid_engine.eviction.sample import SamplingPolicy
from hybrid_engine.groups.checkpoints import Checkpoint, CheckpointKind

MAX_WAYS = 2
"""Ways on from a checkpoint that are told apart: none, one, several."""
MAX_USES = 3
"""Numbers of uses that are told apart: 0, 1, 2 or 3, more."""
EXPECTED_BY_WAYS, EXPECTED_BY_USES = (1.0, 0.2, 4.0), (1.0, 2.0, 4.0, 8.0)
"""How much likelier than usual a use is taken to be, by the ways on and by the uses, before enough was seen."""
INSURANCE = 0.1
"""Chance that what lies behind a checkpoint is lost and it takes its place: of a path of which only the end is kept,
everything is lost at once. Chosen on half of the traces' conversations, see docs/EVICTION.md."""


class ValuedPolicy(SamplingPolicy):
    """Spare checkpoints go first; then the one with the least value, of some drawn at random."""

    def __init__(self) -> None:
        super().__init__()
        self._times = ReuseTimes(
            [by_ways * by_uses for _ in CheckpointKind for by_ways in EXPECTED_BY_WAYS for by_uses in EXPECTED_BY_USES]
        )
        self._class_of: dict[Checkpoint, tuple[int, float]] = {}
        """And at which age it became one of it."""
        self._last_use: dict[Checkpoint, float] = {}
        self._num_uses: dict[Checkpoint, int] = {}

    def record(self, checkpoint: Checkpoint) -> None:
        super().record(checkpoint)
        self._num_uses[checkpoint] = 0
        self._begin(checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        super().use(checkpoint)
        self._settle(checkpoint)
        class_index, from_age = self._class_of[checkpoint]
        self._times.note_use(class_index, from_age, self._age(checkpoint))
        self._num_uses[checkpoint] += 1
        self._begin(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        super().forget(checkpoint)
        self._times.note_end(*self._class_of.pop(checkpoint), self._age(checkpoint))
        del self._last_use[checkpoint], self._num_uses[checkpoint]

    def least(self, drawn: list[Checkpoint]) -> Checkpoint:
        return min(drawn, key=lambda checkpoint: (self.value(checkpoint), checkpoint.last_event))

    def value(self, checkpoint: Checkpoint) -> float:
        """Return what keeping a checkpoint saves: seconds of computing, for each second and byte."""
        self._settle(checkpoint)
        age = self._age(checkpoint)
        num_uses, num_ways, kind = self._traits(self._class_of[checkpoint][0])
        rate = self._times.rate(self._class_of[checkpoint][0], age)
        if num_ways:
            rate += INSURANCE * self._times.rate(_class_index(kind, 0, num_uses), age)
        return rate * self.facts.rebuild_seconds(checkpoint) / self.facts.own_bytes(checkpoint)

    def _begin(self, checkpoint: Checkpoint) -> None:
        self._last_use[checkpoint] = self.facts.clock()
        self._class_of[checkpoint] = self._find_class(checkpoint), 0.0

    def _settle(self, checkpoint: Checkpoint) -> None:
        """Note when a checkpoint has become one of another class: those behind it have come or gone."""
        found, (class_index, from_age) = self._find_class(checkpoint), self._class_of[checkpoint]
        if found != class_index:
            age = self._age(checkpoint)
            self._times.note_end(class_index, from_age, age)
            self._class_of[checkpoint] = found, age

    def _age(self, checkpoint: Checkpoint) -> float:
        return self.facts.clock() - self._last_use[checkpoint]

    def _find_class(self, checkpoint: Checkpoint) -> int:
        num_ways = 0
        for _ in self.facts.tree.ways_on(checkpoint):
            num_ways += 1
            if num_ways == MAX_WAYS:
                break
        num_uses = min(MAX_USES, self._num_uses[checkpoint].bit_length())
        return _class_index(checkpoint.kind, num_ways, num_uses)

    @staticmethod
    def _traits(class_index: int) -> tuple[int, int, int]:
        rest, num_uses = divmod(class_index, MAX_USES + 1)
        kind, num_ways = divmod(rest, MAX_WAYS + 1)
        return num_uses, num_ways, kind


def _class_index(kind: int, num_ways: int, num_uses: int) -> int:
    return (kind * (MAX_WAYS + 1) + num_ways) * (MAX_USES + 1) + num_uses
