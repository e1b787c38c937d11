"""The blocks of one group: who holds them, which can be found, which goes next.

One pool for each group, sized once by `plan.plan_memory`. The arena, in which memory flows between groups, will offer
the same methods.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.free_queue import FreeQueue
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.step_plan import NULL_BLOCK_ID, BlockId

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoints import Checkpoint


def _take_from_the_queue(pool: BlockPool, num_blocks: int) -> None:
    """Blocks leave one by one, in the free queue's order."""


def _no_checkpoints(checkpoint: Checkpoint) -> None:
    raise AssertionError(f"a checkpoint at {checkpoint.position} in a pool whose coordinator keeps none")


class BlockPool:
    """Gives out blocks, takes them back, and finds full ones by their key."""

    def __init__(self, num_blocks: int, *, max_evicted_keys: int = 0) -> None:
        """num_blocks: usable ones; the null block, id 0, comes on top and is never given out."""
        self.null_block = Block(NULL_BLOCK_ID)
        self.blocks = [Block(BlockId(i)) for i in range(1, num_blocks + 1)]
        self.free = FreeQueue(self.blocks)
        self.cached: dict[BlockHash, Block] = {}
        # The same content computed by several requests at once: all but the one in `cached`. A free block has none:
        # what is held is released later, and so keeps the rule that a parent stands behind its children in the queue.
        self.duplicates: dict[BlockHash | None, list[Block]] = {}
        self.evicted: OrderedDict[BlockHash, None] = OrderedDict()
        self._max_evicted_keys = max_evicted_keys
        self.num_freed = 0
        """Blocks that were let go by the last who held them, since the pool was made."""
        self.needed: dict[BlockHash, int] | None = None
        """When set: by key, how often the block is needed; a free block that nothing needs is empty."""
        self.needs_parents = False
        """Whether a needed block needs all before it: each then counts the checkpoints that end with it and the blocks
        right behind it, so that a checkpoint costs as much as it adds. Otherwise each counts all its checkpoints."""
        self.make_empty: Callable[[BlockPool, int], None] = _take_from_the_queue
        """Asked before blocks are taken; where checkpoints are kept whole, it gives some of them up."""
        self.on_checkpoint_lost: Callable[[Checkpoint], None] = _no_checkpoints
        """Told of each checkpoint whose block is taken; it must make the block's list of them empty."""

    @property
    def num_blocks(self) -> int:
        """Usable blocks."""
        return len(self.blocks)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give: empty ones and cached ones that nobody holds."""
        return len(self.free)

    def pin(self, blocks: Iterable[Block]) -> None:
        """Hold blocks once more, so that nothing can take them."""
        for block in blocks:
            queue = block.queue
            if queue is not None:
                del queue[block.block_id]
                block.queue = None
            block.ref_count += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Give out blocks with undefined bytes, forgetting what they held; num_blocks must be free."""
        assert num_blocks <= len(self.free), f"{num_blocks} blocks wanted, {len(self.free)} free"
        self.make_empty(self, num_blocks)
        taken = [self.free.take() for _ in range(num_blocks)]
        for block in taken:
            if block.checkpoints:
                for checkpoint in tuple(block.checkpoints):
                    self.on_checkpoint_lost(checkpoint)
            if block.block_hash is not None:
                block_hash = self._unregister(block)
                if block_hash not in self.cached:
                    self._remember_evicted(block_hash)
            block.ref_count = 1
        return taken

    def release(self, blocks: Sequence[Block], *, evict_first: bool = False) -> None:
        """Let go of blocks, the least valuable first; one that nobody holds any more can be taken again."""
        for block in blocks:
            assert block.ref_count > 0, f"{block} is released but nobody holds it"
            block.ref_count -= 1
            if block.ref_count == 0:
                self.num_freed += 1
                if block.block_hash in self.duplicates:
                    # Somebody holds another copy of the same content, one is enough.
                    self._unregister(block)
                elif not self._is_needed(block):
                    # No checkpoint can use it. It was known all the same: whoever asks for it again is told so.
                    self._remember_evicted(self._unregister(block))
                self.free.put(block, evict_first=evict_first)

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
                self.settle(block)

    def _is_needed(self, block: Block) -> bool:
        return self.needed is None or block.block_hash is None or block.block_hash in self.needed

    def settle(self, block: Block) -> None:
        """Move a free block that nobody can find any more to the empty ones."""
        if block.queue is not None and not block.is_known:
            self.free.remove(block)
            self.free.put(block)

    def forget_all(self) -> None:
        """Make nothing findable by a key any more; held blocks stay held."""
        for block in self.blocks:
            block.block_hash = None
            self.settle(block)
        self.cached.clear()
        self.duplicates.clear()
        self.evicted.clear()

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
        if self._max_evicted_keys == 0:
            return
        self.evicted[block_hash] = None
        self.evicted.move_to_end(block_hash)
        if len(self.evicted) > self._max_evicted_keys:
            self.evicted.popitem(last=False)
