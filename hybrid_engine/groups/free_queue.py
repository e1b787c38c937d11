"""Blocks that nobody holds, in the order in which they are given out again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hybrid_engine.groups.block import Block
from hybrid_engine.step_plan import BlockId


class FreeQueue:
    """Empty blocks leave first, then those marked `evict_first`, then the others, least recently used first.

    Every operation is O(1), taking a block out of the middle included: an OrderedDict is a linked list with an index.
    """

    def __init__(self, blocks: list[Block]) -> None:
        self._empty = blocks[::-1]
        self._evict_first: OrderedDict[BlockId, Block] = OrderedDict()
        self._used: OrderedDict[BlockId, Block] = OrderedDict()

    def __len__(self) -> int:
        return len(self._empty) + len(self._evict_first) + len(self._used)

    @property
    def num_empty(self) -> int:
        """Blocks whose bytes mean nothing."""
        return len(self._empty)

    @property
    def num_cached(self) -> int:
        """Blocks that are free and can still be found."""
        return len(self._evict_first) + len(self._used)

    def num_worthless(self, num_blocks: int) -> int:
        """Return how many of the next num_blocks to leave are empty or marked `evict_first`."""
        return min(num_blocks, len(self._empty) + len(self._evict_first))

    def is_evicted_first(self, block: Block) -> bool:
        """Return whether a block is free and marked `evict_first`."""
        return block.queue is self._evict_first

    def empty_blocks(self) -> list[Block]:
        """Return the blocks whose bytes mean nothing."""
        return list(self._empty)

    def cached_blocks(self) -> Iterator[Block]:
        """Iterate over the blocks that can still be found, the next to go first."""
        yield from self._evict_first.values()
        yield from self._used.values()

    def put(self, block: Block, *, evict_first: bool = False) -> None:
        """Append a block; one that nobody can find goes to the empty ones whatever is asked."""
        if block.block_hash is None and not block.checkpoints:
            self._empty.append(block)
            return
        queue = self._evict_first if evict_first else self._used
        queue[block.block_id] = block
        block.queue = queue

    def remove(self, block: Block) -> None:
        """Take a cached block out, wherever it stands."""
        assert block.queue is not None, f"{block} is not in the free queue"
        del block.queue[block.block_id]
        block.queue = None

    def keep_longer(self, block: Block) -> None:
        """Put a cached block behind all others, whatever it was marked before."""
        self.remove(block)
        self.put(block)

    def take(self) -> Block:
        """Remove and return the block that is worth least; the queue must not be empty."""
        if self._empty:
            return self._empty.pop()
        _, block = (self._evict_first or self._used).popitem(last=False)
        block.queue = None
        return block
