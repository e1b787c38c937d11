"""After Marconi (Pan et al., MLSys 2025, arXiv 2411.19379): recency, and the FLOPs that a byte saves."""

from __future__ import annotations

from hybrid_engine.eviction.sample import SamplingPolicy
from hybrid_engine.groups.checkpoints import Checkpoint

ALPHA = 1.0
"""How much the FLOPs count against recency. The paper starts with 0 and tunes it by replaying what was asked since;
here it is one number for all, the two scales counting alike."""


class FlopAwarePolicy(SamplingPolicy):
    """Evicts the node with the least  recency + ALPHA x FLOP efficiency  among those with one child or none.

    Our reading of the paper: the recency of a node is when it was last used; its efficiency is the FLOPs that going on
    from it instead of from its parent saves, divided by the bytes that it adds to its parent: the states, and the keys
    and values in between. Both are scaled to [0, 1] over the nodes compared. Nodes with several children stay: others
    part there. When one with a single child goes, its states are freed, and the child takes over its keys and values.

    Ours: nodes are the recorded checkpoints, compared are some drawn at random (all, up to that number), FLOPs are the
    seconds that `RebuildCost` tells, and spare checkpoints go first, as under all policies here.
    """

    def least(self, drawn: list[Checkpoint]) -> Checkpoint:
        candidates = [checkpoint for checkpoint in drawn if not self._is_fork(checkpoint)] or drawn
        recency = _scaled([float(checkpoint.last_event) for checkpoint in candidates])
        efficiency = _scaled([self._efficiency(checkpoint) for checkpoint in candidates])
        scores = [when + ALPHA * saved for when, saved in zip(recency, efficiency, strict=True)]
        return candidates[min(range(len(scores)), key=scores.__getitem__)]

    def _is_fork(self, checkpoint: Checkpoint) -> bool:
        ways_on = self.facts.tree.ways_on(checkpoint)
        return next(ways_on, None) is not None and next(ways_on, None) is not None

    def _efficiency(self, checkpoint: Checkpoint) -> float:
        return self.facts.rebuild_seconds(checkpoint) / self.facts.added_bytes(checkpoint)


def _scaled(values: list[float]) -> list[float]:
    """Return values scaled so that the least is 0 and the largest 1; all 0 when they are equal."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]
