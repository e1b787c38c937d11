"""Blocks that nobody holds and that can still be found, in the order in which they are given up."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hybrid_engine.groups.block import Block


class FreeQueue:
    """Those marked `evict_first` leave first, then the others, least recently used first.

    Every operation is O(1), taking a block out of the middle included: an OrderedDict is a linked list with an index.
    """

    def __init__(self) -> None:
        self._evict_first: OrderedDict[Block, None] = OrderedDict()
        self._used: OrderedDict[Block, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._evict_first) + len(self._used)

    def __iter__(self) -> Iterator[Block]:
        """Iterate over the blocks, the next to go first."""
        yield from self._evict_first
        yield from self._used

    def is_evicted_first(self, block: Block) -> bool:
        """Return whether a block is free and marked `evict_first`."""
        return block.queue is self._evict_first

    def put(self, block: Block, *, evict_first: bool = False) -> None:
        """Append a block."""
        queue = self._evict_first if evict_first else self._used
        queue[block] = None
        block.queue = queue

    def remove(self, block: Block) -> None:
        """Take a block out, wherever it stands."""
        assert block.queue is not None, f"{block} is not in the free queue"
        del block.queue[block]
        block.queue = None

    def first(self) -> Block | None:
        """Return the block that is worth least, None when there is none."""
        return next(iter(self._evict_first or self._used), None)
