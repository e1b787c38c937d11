"""What policies may ask about a checkpoint: what it takes, what it saves, and what time it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybrid_engine.groups.checkpoint_tree import CheckpointTree, Node
from hybrid_engine.groups.rebuild_cost import RebuildCost
from hybrid_engine.groups.spec import ENDLESS, AttentionSpec, Group

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoints import Checkpoint


class CheckpointFacts:
    """Bytes and seconds of the recorded checkpoints, as their neighbours come and go."""

    def __init__(self, groups: Sequence[Group], match_unit_tokens: int) -> None:
        self.tree = CheckpointTree(match_unit_tokens)
        self.cost = RebuildCost(groups)
        self.clock: Callable[[], float] = time.monotonic
        """Seconds since some moment. Whoever replays a trace puts the trace's own clock here."""
        self._block_bytes = [group.block_bytes for group in groups]
        self._kept_token_bytes = 0.0
        self._state_bytes = 0
        self._windows: list[tuple[int, float]] = []
        for group in groups:
            reach = getattr(group.spec, "window", None) or getattr(group.spec, "chunk", None)
            if group.block_size == ENDLESS:
                self._state_bytes += group.block_bytes
            elif reach is None:
                self._kept_token_bytes += group.block_bytes / group.block_size
            else:
                self._windows.append((reach, group.block_bytes / group.block_size))
        self._is_token_group = [isinstance(group.spec, AttentionSpec) for group in groups]

    def gap_tokens(self, checkpoint: Checkpoint) -> int:
        """Return the tokens between a checkpoint and the longest other one on the way to it."""
        ancestor = self.tree.ancestor(checkpoint)
        return checkpoint.position - (ancestor.position if ancestor else 0)

    def rebuild_seconds(self, checkpoint: Checkpoint) -> float:
        """Return how long it would take to get from the nearest surviving ancestor to a checkpoint."""
        return self.cost.seconds(checkpoint.position - self.gap_tokens(checkpoint), checkpoint.position)

    def own_bytes(self, checkpoint: Checkpoint) -> float:
        """Return the bytes that no other checkpoint needs: its states, and the tokens that lie on its way alone.

        Of windows it is an estimate: what the nearest checkpoint on each side needs too is left out.
        """
        own_tokens = self.tree.own_units(checkpoint) * self.tree.match_unit_tokens
        num_bytes = self._state_bytes + own_tokens * self._kept_token_bytes
        for block, is_partial, block_bytes in zip(
            checkpoint.blocks, self._is_token_group, self._block_bytes, strict=False
        ):
            if is_partial and block is not None and block.block_hash is None and len(block.checkpoints) == 1:
                num_bytes += block_bytes
        if self._windows:
            gap, behind = self.gap_tokens(checkpoint), self._tokens_behind(checkpoint)
            for reach, token_bytes in self._windows:
                num_bytes += token_bytes * max(0, min(reach, gap) - max(0, reach - behind))
        return num_bytes

    def added_bytes(self, checkpoint: Checkpoint) -> float:
        """Return the bytes that a checkpoint adds to the nearest ancestor: states, and tokens in between."""
        gap = self.gap_tokens(checkpoint)
        windows = sum(token_bytes * min(reach, gap) for reach, token_bytes in self._windows)
        return self._state_bytes + gap * self._kept_token_bytes + windows

    def _tokens_behind(self, checkpoint: Checkpoint) -> int:
        """Return the tokens between a checkpoint and one that lies behind it; ENDLESS: none does."""
        following = next(self.tree.ways_on(checkpoint), None)
        if following is None:
            return ENDLESS
        if isinstance(following, Node):
            return following.num_units * self.tree.match_unit_tokens - checkpoint.position
        return following.position - checkpoint.position
