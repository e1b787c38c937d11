"""The blocks of one group: who holds them, which can be found, which goes next.

Their memory comes from an arena, extent by extent, and goes back there when another group needs it more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from hybrid_engine.groups.arena import Arena, make_extent
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.extent import EmptyBlocks
from hybrid_engine.groups.free_queue import FreeQueue
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.recent import RecentDict
from hybrid_engine.step_plan import NULL_BLOCK_ID

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoints import Checkpoint


def _keep_nothing(block_hash: BlockHash, block: Block) -> None:
    """What leaves the pool is lost."""


def _no_checkpoints(checkpoint: Checkpoint) -> None:
    raise AssertionError(f"a checkpoint at {checkpoint.position} in a pool whose coordinator keeps none")


class BlockPool:
    """Gives out blocks, takes them back, and finds full ones by their key."""

    def __init__(self, arena: Arena, *, max_evicted_keys: int = 0) -> None:
        """arena: whose memory it takes; pools are made in the order of the groups that the arena's region names."""
        self.arena = arena
        self._index = len(arena.pools)
        arena.pools.append(self)
        self.blocks_per_extent = arena.region.blocks_per_extent[self._index]
        self.null_block = Block(NULL_BLOCK_ID)
        self.empty = EmptyBlocks(self.blocks_per_extent)
        self.free = FreeQueue()
        self.num_owned = 0
        """Blocks in the extents that the pool has."""
        self.num_fixed_extents = 0
        """Extents that can't be vacated now."""
        self.cached: dict[BlockHash, Block] = {}
        # The same content computed by several requests at once: all but the one in `cached`. A free block has none:
        # what is held is released later, and so keeps the rule that a parent stands behind its children in the queue.
        self.duplicates: dict[BlockHash | None, list[Block]] = {}
        self.evicted: RecentDict[BlockHash, None] = RecentDict(max_evicted_keys)
        self._max_evicted_keys = max_evicted_keys
        self.needed: dict[BlockHash, int] | None = None
        """When set: by key, how often the block is needed; a free block that nothing needs is empty."""
        self.needs_parents = False
        """Whether a needed block needs all before it: each then counts the checkpoints that end with it and the blocks
        right behind it, so that a checkpoint costs as much as it adds. Otherwise each counts all its checkpoints."""
        self.on_checkpoint_lost: Callable[[Checkpoint], None] = _no_checkpoints
        """Told of each checkpoint whose block is taken; it must make the block's list of them empty."""

        self.on_evicted: Callable[[BlockHash, Block], None] = _keep_nothing
        """Told of each full block that can't be found any more, while its bytes are still there: nothing writes them
        before the next step. Window blocks that a running request has passed are not worth telling."""

    @property
    def num_blocks(self) -> int:
        """Most blocks that the pool could ever have: what the arena holds of them when no other group has any."""
        return self.arena.num_extents * self.blocks_per_extent

    @property
    def num_held(self) -> int:
        """Blocks that somebody holds."""
        return self.num_owned - len(self.empty) - len(self.free)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give, all that is cached, in this group and the others, given up."""
        return self.arena.num_blocks_left(self)

    def has_room(self, num_blocks: int, *, num_reserved: int) -> bool:
        """Return whether so many blocks can be taken with some of the arena's extents left."""
        wanted = [num_blocks if pool is self else 0 for pool in self.arena.pools]
        return not self.arena.num_extents_short(wanted, num_reserved=num_reserved)

    def blocks(self) -> Iterator[Block]:
        """Iterate over all blocks that the pool has."""
        for extent in self.empty.extents():
            yield from extent.blocks

    def pin(self, blocks: Iterable[Block]) -> None:
        """Hold blocks once more, so that nothing can take them."""
        for block in blocks:
            queue = block.queue
            if queue is not None:
                del queue[block]
                block.queue = None
            block.ref_count += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Give out blocks with undefined bytes; num_blocks must be free."""
        if len(self.empty) < num_blocks:
            self.arena.make_room(self, num_blocks)
        taken = self.empty.take(num_blocks)
        for block in taken:
            block.ref_count = 1
        return taken

    def evict(self, block: Block) -> None:
        """Make a cached block empty; who asks for it again is told that it was known."""
        is_passed = self.free.is_evicted_first(block)
        self.free.remove(block)
        for checkpoint in tuple(block.checkpoints):
            self.on_checkpoint_lost(checkpoint)
        if block.block_hash is not None:
            block_hash = self._unregister(block)
            if block_hash not in self.cached:
                self._remember_evicted(block_hash)
                if not is_passed:
                    self.on_evicted(block_hash, block)
        self.empty.put(block)

    def release(self, blocks: Sequence[Block], *, evict_first: bool = False) -> None:
        """Let go of blocks, the least valuable first; one that nobody holds any more can be taken again."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.arena.num_freed += 1
                if block.block_hash in self.duplicates:
                    # Somebody holds another copy of the same content, one is enough.
                    self._unregister(block)
                elif not self._is_needed(block):
                    # No checkpoint can use it. It was known all the same: whoever asks for it again is told so.
                    self._remember_evicted(self._unregister(block))
                self._put_free(block, evict_first=evict_first)

    def _put_free(self, block: Block, *, evict_first: bool = False) -> None:
        """Put a block that nobody holds where it belongs."""
        if block.is_known:
            block.released_at = self.arena.num_freed
            self.free.put(block, evict_first=evict_first)
        else:
            self.empty.put(block)

    def register(self, block: Block, block_hash: BlockHash) -> None:
        """Make a full block, which somebody holds, findable; its bytes must be written."""
        assert block.block_hash is None, f"{block} has a key already"
        block.block_hash = block_hash
        other = self.cached.setdefault(block_hash, block)
        if other is not block:
            self.duplicates.setdefault(block_hash, []).append(block)
            if other.ref_count == 0:
                self._unregister(other)
                self.settle(other)
        self.evicted.pop(block_hash, None)

    def need(self, keys: Sequence[BlockHash]) -> None:
        """Keep the blocks with these keys, each behind its parent, until `release_need`."""
        needed = self.needed
        assert needed is not None, "this pool keeps blocks by their recency"
        for key in reversed(keys):
            num_before = needed.get(key, 0)
            needed[key] = num_before + 1
            if num_before and self.needs_parents:
                return

    def can_need(self, keys: Sequence[BlockHash]) -> bool:
        """Return whether the blocks with these keys are all there to be kept."""
        needed = self.needed
        assert needed is not None, "this pool keeps blocks by their recency"
        for key in reversed(keys):
            if key not in self.cached:
                return False
            if self.needs_parents and key in needed:
                return True
        return True

    def release_need(self, keys: Sequence[BlockHash]) -> None:
        """Undo `need`; a free block that nothing needs any more is empty at once."""
        needed = self.needed
        assert needed is not None, "this pool keeps blocks by their recency"
        for key in reversed(keys):
            needed[key] -= 1
            if needed[key]:
                if self.needs_parents:
                    return
                continue
            del needed[key]
            block = self.cached.get(key)
            if block is not None and block.ref_count == 0:
                self._unregister(block)
                self._remember_evicted(key)
                self.on_evicted(key, block)
                self.settle(block)

    def _is_needed(self, block: Block) -> bool:
        return self.needed is None or block.block_hash is None or block.block_hash in self.needed

    def settle(self, block: Block) -> None:
        """Move a free block that nobody can find any more to the empty ones."""
        if block.queue is not None and not block.is_known:
            self.free.remove(block)
            self.empty.put(block)

    def keep_longer(self, block: Block) -> None:
        """Put a cached block behind all others, whatever it was marked before."""
        self.free.remove(block)
        self._put_free(block)

    def forget_all(self) -> None:
        """Make nothing findable by a key any more; held blocks stay held."""
        for block in list(self.blocks()):
            block.block_hash = None
            self.settle(block)
        self.cached.clear()
        self.duplicates.clear()
        self.evicted.clear()

    # Extents

    def num_extents_for(self, num_held: int) -> int:
        """Return the fewest extents that hold so many blocks."""
        return max(-(-num_held // self.blocks_per_extent), self.num_fixed_extents)

    def add_extent(self, number: int) -> None:
        """Take in an extent of the arena that no pool has."""
        extent = make_extent(self.arena.region, self._index, number)
        self.num_owned += len(extent.blocks)
        self.empty.add(extent)

    def can_vacate(self) -> bool:
        """Return whether the pool's empty blocks would fill an extent, one that can be vacated."""
        return len(self.empty) >= self.blocks_per_extent and self.empty.emptiest() is not None

    def num_to_move(self) -> int:
        """Return how many blocks must be moved to vacate an extent."""
        extent = self.empty.emptiest()
        assert extent is not None, "no extent can be vacated"
        return len(extent.blocks) - len(extent.empty)

    def vacate_extent(self) -> int:
        """Give up an extent, its blocks that are not empty moved into others; return its number."""
        extent = self.empty.emptiest()
        assert extent is not None, "no extent can be vacated"
        self.empty.remove(extent)
        self.num_owned -= len(extent.blocks)
        is_empty = set(extent.empty)
        leaving = [block for block in extent.blocks if block not in is_empty]
        for block, target in zip(leaving, self.empty.take(len(leaving)), strict=True):
            self._move(block, target)
        return extent.number

    def _move(self, block: Block, target: Block) -> None:
        """Let a block take the place of an empty one, which is no more."""
        extent = target.extent
        assert extent is not None, f"{target} lies in no extent"
        self.arena.on_move(self, block.block_id, target.block_id)
        self.arena.num_moved += 1
        extent.put(block, target.block_id)

    def fix(self, blocks: Iterable[Block]) -> None:
        """Keep blocks where they lie until `unfix`, since something outside the steps writes them. Calls may nest."""
        for block in blocks:
            if block.extent is not None:
                block.extent.num_fixed += 1
                self.num_fixed_extents += block.extent.num_fixed == 1

    def unfix(self, blocks: Iterable[Block]) -> None:
        """Undo `fix`."""
        for block in blocks:
            if block.extent is not None:
                block.extent.num_fixed -= 1
                self.num_fixed_extents -= block.extent.num_fixed == 0

    def _unregister(self, block: Block) -> BlockHash:
        block_hash, block.block_hash = block.block_hash, None
        assert block_hash is not None, f"{block} has no key"
        duplicates = self.duplicates.get(block_hash)
        if duplicates is None:
            del self.cached[block_hash]
            return block_hash
        if self.cached[block_hash] is block:
            self.cached[block_hash] = duplicates.pop()
        else:
            duplicates.remove(block)
        if not duplicates:
            del self.duplicates[block_hash]
        return block_hash

    def _remember_evicted(self, block_hash: BlockHash) -> None:
        if self._max_evicted_keys > 0:
            self.evicted[block_hash] = None
