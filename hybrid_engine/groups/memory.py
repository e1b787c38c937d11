"""The memory of all groups: their pools, whether there is room, and what must be copied before the next step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.layout import MemoryLayout
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.step_plan import WHOLE_BLOCK, BlockCopy, BlockId, BlockMove


class CacheMemory:
    """A pool for each group, and the arenas that they share."""

    def __init__(self, layout: MemoryLayout, *, max_evicted_keys: int = 0) -> None:
        self.layout = layout
        self.groups = layout.groups
        self.arenas = tuple(map(Arena, layout.regions))
        pools: dict[int, BlockPool] = {}
        for arena in self.arenas:
            arena.on_move = self._move
            for i in arena.region.group_ids:
                pools[i] = BlockPool(arena, max_evicted_keys=max_evicted_keys)
        self.pools = tuple(pools[i] for i in range(len(self.groups)))
        """By group."""
        self._index_of = {pool: i for i, pool in pools.items()}
        self._num_token_pools = Counter(pools[i].arena for i in pools if self.groups[i].block_size != ENDLESS)
        self._copies: list[BlockCopy] = []
        self._moves: list[BlockMove] = []

    # Room

    def find_shortage(self, num_blocks: Sequence[int]) -> tuple[Arena, int] | None:
        """Return where there is no room for so many more blocks of each group, and how many extents of it are missing;
        None when there is room, all that is cached given up."""
        for arena in self.arenas:
            num_short = arena.num_extents_short([num_blocks[i] for i in arena.region.group_ids])
            if num_short:
                return arena, num_short
        return None

    def has_at_hand(self, num_blocks: Sequence[int]) -> bool:
        """Return whether each group has place for so many more blocks in the extents that it has."""
        wanted = zip(self.pools, num_blocks, strict=True)
        return all([pool.num_held + count <= pool.num_owned for pool, count in wanted])

    def margin_blocks(self, group_index: int, watermark: float) -> int:
        """Return a group's part of a share of its arena that is to stay free."""
        if self.groups[group_index].block_size == ENDLESS:
            # A request never needs a second working state to grow.
            return 0
        pool = self.pools[group_index]
        return math.ceil(watermark * pool.num_blocks / self._num_token_pools[pool.arena])

    def describe(self) -> str:
        """Say in few words how large the memory is, and what it is given out in."""
        sizes = sorted({group.block_size for group in self.groups if group.block_size != ENDLESS})
        parts = [f"blocks of {' and '.join(map(str, sizes))} tokens"] if sizes else []
        if any(group.block_size == ENDLESS for group in self.groups):
            parts.append("states")
        return f"{self.layout.num_bytes:,} bytes in {' and '.join(parts)}"

    # What must be copied before the next step

    def copy(self, group_index: int, source: Block, target: Block, num_slots: int) -> None:
        """Have the first slots of a block, or a state, copied before the next step, after all that was asked before."""
        group_id = self.groups[group_index].group_id
        self._copies.append(BlockCopy(group_id, source.block_id, target.block_id, num_slots))

    def _move(self, pool: BlockPool, source_id: BlockId, target_id: BlockId) -> None:
        group_id = self.groups[self._index_of[pool]].group_id
        self._copies.append(BlockCopy(group_id, source_id, target_id, WHOLE_BLOCK))
        self._moves.append(BlockMove(group_id, source_id, target_id))

    def take_copies(self) -> tuple[tuple[BlockCopy, ...], tuple[BlockMove, ...]]:
        """Return what the next step must copy first, in this order, and which of that are moves; forget it here."""
        copies, moves = tuple(self._copies), tuple(self._moves)
        self._copies.clear()
        self._moves.clear()
        return copies, moves

    def stored_id(self, group_index: int, block: Block) -> BlockId:
        """Return where a block's bytes lie until the next step begins: elsewhere if it is to be moved then."""
        group_id, block_id = self.groups[group_index].group_id, block.block_id
        for move in reversed(self._moves):
            if move.group_id == group_id and move.target_id == block_id:
                block_id = move.source_id
        return block_id
