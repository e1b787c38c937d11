"""Prefixes that stay cached whatever else needs memory, for as long as the longest request still fits beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_engine.errors import RequestError
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoints import Checkpoint, CheckpointIndex
from hybrid_engine.groups.memory import CacheMemory
from hybrid_engine.prefix_lookup import CacheHit


@dataclass(eq=False, frozen=True, slots=True)
class HeldPrefix:
    """One pinned prefix; equal only to itself."""

    num_tokens: int
    checkpoint: Checkpoint | None
    """Recorded where the prefix ends, if it ends inside a block or some layers are recurrent."""
    blocks: tuple[tuple[Block, ...], ...]
    """By group: full ones and partly filled ones, each held once."""


class Pins:
    """The pinned prefixes of one coordinator."""

    def __init__(self, managers: Sequence[GroupManager], memory: CacheMemory, checkpoints: CheckpointIndex) -> None:
        self._managers = managers
        self._memory = memory
        self._checkpoints = checkpoints
        self.held: list[HeldPrefix] = []

    def num_blocks(self) -> list[int]:
        """Return how many blocks of each group are pinned; one that several prefixes share counts once."""
        return [len(blocks) for blocks in self._blocks(self.held)]

    def hold(self, hit: CacheHit, tables: Sequence[Sequence[Block]], longest: Sequence[int]) -> HeldPrefix:
        """Pin what was found of a prompt.

        tables: the hit's full blocks by group. longest: blocks by group of the longest request.
        Raises RequestError, having changed nothing, when the longest request would not fit beside all that is pinned.
        """
        partials = hit.checkpoint.blocks if hit.checkpoint else (None,) * len(tables)
        blocks = tuple(
            tuple(block for block in (*table, partial) if block is not None and block is not manager.pool.null_block)
            for table, partial, manager in zip(tables, partials, self._managers, strict=True)
        )
        prefix = HeldPrefix(hit.num_computed_tokens, hit.checkpoint, blocks)
        self._check_room(prefix, longest)
        for manager, its in zip(self._managers, blocks, strict=True):
            manager.pool.pin(its)
        if prefix.checkpoint is not None:
            self._checkpoints.touch(prefix.checkpoint)
            self._checkpoints.pin(prefix.checkpoint)
        self.held.append(prefix)
        return prefix

    def release(self, prefix: HeldPrefix) -> None:
        """Let a pinned prefix go the way of all others; one that is not pinned any more is ignored."""
        if prefix not in self.held:
            return
        self.held.remove(prefix)
        for manager, blocks in zip(self._managers, prefix.blocks, strict=True):
            manager.pool.release(blocks[::-1])
        if prefix.checkpoint is not None:
            self._checkpoints.unpin(prefix.checkpoint)

    def release_all(self) -> None:
        """Let all pinned prefixes go."""
        for prefix in tuple(self.held):
            self.release(prefix)

    def _check_room(self, prefix: HeldPrefix, longest: Sequence[int]) -> None:
        pinned = [len(blocks) for blocks in self._blocks([*self.held, prefix])]
        for arena in self._memory.arenas:
            group_ids = arena.region.group_ids
            num_extents = sum(
                math.ceil((pinned[i] + longest[i]) / self._memory.pools[i].blocks_per_extent) for i in group_ids
            )
            if num_extents > arena.num_extents:
                raise RequestError(
                    f"pinning {prefix.num_tokens:,} tokens, with {len(self.held)} prefixes pinned before, would take "
                    f"{num_extents:,} extents of cache memory together with one request of the longest kind, there are "
                    f"{arena.num_extents:,}: unpin something, lower max_model_len, or give more cache memory"
                )

    def _blocks(self, prefixes: Sequence[HeldPrefix]) -> list[set[Block]]:
        return [{block for prefix in prefixes for block in prefix.blocks[i]} for i in range(len(self._managers))]
