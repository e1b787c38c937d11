"""Where the bytes of the caches lie: one allocation, its regions, extents, blocks, and the layers' tensors in a block.

A *region* is cut into equal extents; those of one region flow between the groups that share it (`groups/arena.py`). A
block's id is its distance from the region's start in a unit that divides every group's blocks, so that a kernel finds
any block of any group by one multiplication, and no group is padded to the size of another:

    region   | null  | extent 0                     | extent 1                     | ...
    group A  |       | A0      | A1      | A2      .|                              |      . left over, at most 2 %
    group B  |       |                              | B0           | B1           .|
    id       0       first_unit                     first_unit + extent_units

Id 0 is the null block of every group: never read, and written only by rows that fill up a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.spec import Group

ALIGNMENT_BYTES = 64
"""Each tensor of a block starts at a multiple of this: a cache line. The layers of real models fill whole ones."""
MAX_LEFT_OVER = 0.02
"""Share of an extent that no block of a group fits in any more, at most."""
MAX_LARGEST_BLOCKS = math.ceil(1 / MAX_LEFT_OVER)
"""An extent of so many of the largest blocks leaves over less than that share whatever the other sizes are."""


class Pages(NamedTuple):
    """Where the tensors of a group's layers lie in a block, by layer and tensor, in bytes from the block's start."""

    offsets: tuple[tuple[int, ...], ...]
    stride_bytes: int
    """From one block to the next: the block's bytes, each tensor aligned."""


def lay_out_pages(group: Group) -> Pages:
    """Put the tensors of a group's layers one behind the other."""
    offsets, end = [], 0
    for _ in group.layer_indices:
        of_layer = []
        for num_bytes in group.spec.tensor_bytes:
            of_layer.append(end)
            end += -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        offsets.append(tuple(of_layer))
    return Pages(tuple(offsets), end)


@dataclass(frozen=True)
class Region:
    """A stretch of the memory that some groups share."""

    group_ids: tuple[int, ...]
    block_units: tuple[int, ...]
    """Units of a block, by group."""
    unit_bytes: int
    start_bytes: int
    """Where id 0 lies in the memory."""
    first_unit: int
    """Where extent 0 lies: the largest block stands below it, for the null block."""
    extent_units: int
    num_extents: int

    @property
    def blocks_per_extent(self) -> tuple[int, ...]:
        """How many blocks of each group an extent holds."""
        return tuple(self.extent_units // units for units in self.block_units)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole region."""
        return (self.first_unit + self.num_extents * self.extent_units) * self.unit_bytes

    @property
    def extent_bytes(self) -> int:
        """Bytes of an extent."""
        return self.extent_units * self.unit_bytes

    def num_ids(self, index: int) -> int:
        """Return a bound of the ids of the region's index-th group: all blocks have ids below it."""
        return self.first_unit + self.num_extents * self.extent_units - self.block_units[index] + 1

    def left_over(self, index: int) -> float:
        """Return the share of an extent in which no block of the region's index-th group fits any more."""
        return self.extent_units % self.block_units[index] / self.extent_units


@dataclass(frozen=True)
class MemoryLayout:
    """Where all blocks of all groups can lie."""

    groups: tuple[Group, ...]
    pages: tuple[Pages, ...]
    """By group."""
    regions: tuple[Region, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the one allocation."""
        return sum(region.num_bytes for region in self.regions)

    def region_of(self, group_index: int) -> tuple[Region, int]:
        """Return a group's region, and which of its groups it is."""
        for region in self.regions:
            if group_index in region.group_ids:
                return region, region.group_ids.index(group_index)
        raise AssertionError(f"group {group_index} has no region")

    def num_ids(self, group_index: int) -> int:
        """Return a bound of a group's block ids: all are below it."""
        region, index = self.region_of(group_index)
        return region.num_ids(index)

    def check(self) -> None:
        """Prove that the bytes of all (group, layer, block) lie apart, and inside the memory.

        Tensors lie apart in a block, blocks in an extent, extents in a region, regions in the memory. An extent belongs
        to one group at a time: that is the arena's to keep. Raises AssertionError, with the facts.
        """
        end = 0
        for region in self.regions:
            assert region.start_bytes == end, f"a region starts at {region.start_bytes}, the one before ends at {end}"
            end += region.num_bytes
            for index, group_index in enumerate(region.group_ids):
                self._check_group(region, index, group_index)
        held = sorted(group_index for region in self.regions for group_index in region.group_ids)
        assert held == list(range(len(self.groups))), f"regions have groups {held} of {len(self.groups)}"

    def _check_group(self, region: Region, index: int, group_index: int) -> None:
        group, pages, num_units = self.groups[group_index], self.pages[group_index], region.block_units[index]
        assert pages.stride_bytes == num_units * region.unit_bytes, f"{group}: {pages.stride_bytes} bytes, {num_units}"
        assert region.first_unit >= num_units, f"{group}: its null block reaches into extent 0"
        assert region.extent_units >= num_units, f"{group}: no block fits in an extent"
        end = 0
        for of_layer in pages.offsets:
            for offset, num_bytes in zip(of_layer, group.spec.tensor_bytes, strict=True):
                assert offset >= end, f"{group}: a tensor at {offset}, up to {end} is taken"
                assert offset % ALIGNMENT_BYTES == 0, f"{group}: a tensor at {offset}, which is not aligned"
                end = offset + num_bytes
        assert end <= pages.stride_bytes, f"{group}: {end} bytes in a block of {pages.stride_bytes}"


def split_memory(groups: Sequence[Group], num_blocks: Sequence[int]) -> MemoryLayout:
    """Give each group a region of its own with so many usable blocks, which stays as it is."""
    pages = tuple(map(lay_out_pages, groups))
    regions, start = [], 0
    for i, (of_group, count) in enumerate(zip(pages, num_blocks, strict=True)):
        regions.append(Region((i,), (1,), of_group.stride_bytes, start, 1, 1, count))
        start += regions[-1].num_bytes
    return MemoryLayout(tuple(groups), pages, tuple(regions))


def share_memory(groups: Sequence[Group], memory_bytes: int) -> MemoryLayout:
    """Let all groups share one region. Raises CapacityError when not each of them can have an extent."""
    pages = tuple(map(lay_out_pages, groups))
    strides = [each.stride_bytes for each in pages]
    unit_bytes, largest = math.gcd(*strides), max(strides)
    extent_bytes = _choose_extent_bytes(strides, memory_bytes - largest)
    num_extents = (memory_bytes - largest) // extent_bytes
    if num_extents < len(groups):
        raise CapacityError(
            f"the cache memory is {memory_bytes:,} bytes, one block in every group takes "
            f"{largest * (1 + len(groups)):,} with the null block: give at least that much"
        )
    region = Region(
        group_ids=tuple(range(len(groups))),
        block_units=tuple(stride // unit_bytes for stride in strides),
        unit_bytes=unit_bytes,
        start_bytes=0,
        first_unit=largest // unit_bytes,
        extent_units=extent_bytes // unit_bytes,
        num_extents=num_extents,
    )
    return MemoryLayout(tuple(groups), pages, (region,))


def _choose_extent_bytes(strides: Sequence[int], num_bytes: int) -> int:
    """Return the extent's size: the least multiple of the largest block that leaves over at most MAX_LEFT_OVER.

    Where memory is so small that not every group could have such an extent, the multiple that leaves over least.
    """
    sizes = [count * max(strides) for count in range(1, MAX_LARGEST_BLOCKS + 1)]
    fitting = [size for size in sizes if num_bytes // size >= len(strides)] or sizes[:1]
    good = [size for size in fitting if _left_over(strides, size) <= MAX_LEFT_OVER]
    return good[0] if good else min(fitting, key=lambda size: _left_over(strides, size))


def _left_over(strides: Sequence[int], extent_bytes: int) -> float:
    return max(extent_bytes % stride for stride in strides) / extent_bytes
