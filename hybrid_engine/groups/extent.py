"""An extent of the memory, and the empty blocks of one group over all its extents."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from hybrid_engine.groups.block import Block
from hybrid_engine.step_plan import BlockId


class Extent:
    """A stretch of memory while one group has it, cut into blocks of that group."""

    __slots__ = ("block_units", "blocks", "empty", "first_id", "num_fixed", "number")

    def __init__(self, number: int, first_id: int, block_units: int, num_blocks: int) -> None:
        """number: which of the region's. first_id, block_units: the id of its first block, and from one to the next."""
        self.number = number
        self.first_id, self.block_units = first_id, block_units
        self.blocks = [Block(BlockId(first_id + i * block_units), self) for i in range(num_blocks)]
        # Taken from the end: in the order of their ids.
        self.empty = self.blocks[::-1]
        self.num_fixed = 0
        """Blocks that can't be moved now: something outside the steps is writing them."""

    def put(self, block: Block, block_id: BlockId) -> None:
        """Let a block lie where the one with this id lay."""
        self.blocks[(block_id - self.first_id) // self.block_units] = block
        block.block_id, block.extent = block_id, self

    def __repr__(self) -> str:
        return f"Extent({self.number}, {len(self.empty)} of {len(self.blocks)} blocks empty)"


class EmptyBlocks:
    """The blocks of a group whose bytes mean nothing, by extent, so that the fullest extents are filled up first.

    Extents are kept by how many of their blocks are empty: every operation is O(1), finding the next extent to fill
    apart, which looks through these counts.
    """

    def __init__(self, blocks_per_extent: int) -> None:
        # OrderedDicts, since the end of a dict that others left from there is slow to find.
        self._by_count: list[OrderedDict[Extent, None]] = [OrderedDict() for _ in range(blocks_per_extent + 1)]
        self._current: Extent | None = None
        self._num = 0

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[Block]:
        for extent in self.extents():
            yield from extent.empty

    def extents(self) -> Iterator[Extent]:
        """Iterate over the extents of the group, the fullest first."""
        for extents in self._by_count:
            yield from extents

    def add(self, extent: Extent) -> None:
        """Take in an extent with all its blocks."""
        self._by_count[len(extent.empty)][extent] = None
        self._num += len(extent.empty)

    def remove(self, extent: Extent) -> None:
        """Drop an extent with all its blocks."""
        del self._by_count[len(extent.empty)][extent]
        self._num -= len(extent.empty)
        if self._current is extent:
            self._current = None

    def put(self, block: Block) -> None:
        """Take in a block."""
        extent = block.extent
        assert extent is not None, f"{block} lies in no extent"
        num_empty = len(extent.empty)
        extent.empty.append(block)
        del self._by_count[num_empty][extent]
        self._by_count[num_empty + 1][extent] = None
        self._num += 1

    def take(self, num_blocks: int) -> list[Block]:
        """Remove and return so many blocks; there must be as many."""
        taken: list[Block] = []
        while len(taken) < num_blocks:
            extent = self._to_fill()
            empty = extent.empty
            num_before, start = len(empty), max(0, len(empty) - num_blocks + len(taken))
            taken += empty[: start - 1 if start else None : -1]
            del empty[start:]
            del self._by_count[num_before][extent]
            self._by_count[start][extent] = None
        self._num -= num_blocks
        return taken

    def emptiest(self) -> Extent | None:
        """Return an extent that fewest blocks have to leave, none of them fixed; None where there is none."""
        for extents in reversed(self._by_count):
            for extent in extents:
                if not extent.num_fixed:
                    return extent
        return None

    def _to_fill(self) -> Extent:
        """Return the extent that was filled last, if there is room in it, or the fullest one."""
        if self._current is None or not self._current.empty:
            # Of equally full ones the last that changed.
            self._current = next(next(reversed(extents)) for extents in self._by_count[1:] if extents)
        return self._current
