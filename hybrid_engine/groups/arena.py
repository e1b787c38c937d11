"""Memory that several groups share: extents flow to where they are needed, and nobody says in what ratio.

An extent belongs to one group at a time, or to none yet. A group that needs blocks and has no empty one gets an extent
that none has; else one of another group that has as many empty blocks as an extent holds, wherever they lie: those in
use in its emptiest extent are moved into the others. Else what is worth least is given up, whichever group it
is of, until one or the other is there. So each group can have, at any time, whatever the others don't hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.extent import Extent
from hybrid_engine.groups.layout import Region
from hybrid_engine.step_plan import BlockId

if TYPE_CHECKING:
    from hybrid_engine.groups.pool import BlockPool


def _refuse_to_move(pool: BlockPool, source_id: BlockId, target_id: BlockId) -> None:
    raise AssertionError(f"block {source_id} is to be moved to {target_id} by nobody")


class Arena:
    """The extents of one region, and the pools of the groups that share it."""

    def __init__(self, region: Region) -> None:
        self.region = region
        self.num_extents = region.num_extents
        self.pools: list[BlockPool] = []
        """In the order of the region's groups; each pool adds itself."""
        self._unowned = list(range(region.num_extents))[::-1]
        self.give_up_one: Callable[[], bool] = self._evict_one
        """Gives up what is worth least in all groups; False when there is nothing. Where checkpoints are kept whole, a
        whole one goes; else one block."""
        self.on_move: Callable[[BlockPool, BlockId, BlockId], None] = _refuse_to_move
        """Told of each block whose bytes must move before the next step: its pool, where they lie, where they go."""
        self.num_freed = 0
        """Blocks that were let go by the last who held them, since the arena was made."""
        self.num_moved = 0
        """Blocks moved out of the way, since the arena was made."""

    @property
    def num_unowned(self) -> int:
        """Extents that no group has."""
        return len(self._unowned)

    def num_extents_short(self, num_blocks: Sequence[int], *, num_reserved: int = 0) -> int:
        """Return how many extents are missing to hold so many more blocks of each pool, all that is cached given up."""
        wanted = num_reserved - self.num_extents
        for pool, count in zip(self.pools, num_blocks, strict=True):
            wanted += pool.num_extents_for(pool.num_held + count)
        return max(0, wanted)

    def num_blocks_left(self, pool: BlockPool) -> int:
        """Return how many blocks one pool can give, all that is cached, of any group, given up."""
        others = sum(other.num_extents_for(other.num_held) for other in self.pools if other is not pool)
        return (self.num_extents - others) * pool.blocks_per_extent - pool.num_held

    def make_room(self, pool: BlockPool, num_blocks: int) -> None:
        """Let a pool have so many empty blocks."""
        while len(pool.empty) < num_blocks:
            if self._unowned:
                pool.add_extent(self._unowned.pop())
            elif (donor := self._find_donor(pool)) is not None:
                pool.add_extent(donor.vacate_extent())
            elif not self.give_up_one():
                raise AssertionError(
                    f"{len(pool.empty)} of {num_blocks} blocks are empty, and nothing is left to give up"
                )

    def _find_donor(self, pool: BlockPool) -> BlockPool | None:
        """Return another pool whose empty blocks would fill an extent, the one that has to move least for it."""
        donors = [other for other in self.pools if other is not pool and other.can_vacate()]
        return min(donors, key=lambda donor: donor.num_to_move(), default=None)

    def _evict_one(self) -> bool:
        """Give up the block that is worth least: marked `evict_first`, else the longest unused, of any group."""
        best: tuple[bool, int] | None = None
        victim: tuple[BlockPool, Block] | None = None
        for pool in self.pools:
            block = pool.free.first()
            if block is not None:
                rank = not pool.free.is_evicted_first(block), block.released_at
                if best is None or rank < best:
                    best, victim = rank, (pool, block)
        if victim is None:
            return False
        victim[0].evict(victim[1])
        return True


def make_extent(region: Region, index: int, number: int) -> Extent:
    """Cut an extent into blocks of the region's index-th group."""
    first_id = region.first_unit + number * region.extent_units
    return Extent(number, first_id, region.block_units[index], region.blocks_per_extent[index])
