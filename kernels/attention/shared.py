"""Keys that several requests of a step see alike, because their tables begin with the same blocks.

Found on the host, where the tables are arrays. Kernels read such keys once for the queries of all of them. Ranges begin
and end at multiples of SHARED_UNIT, which is a multiple of every kernel's split: a request's keys are cut at the same
places whether it shares them or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from torch import Tensor

SHARED_UNIT = 512
TILE_MEMBERS = 64
"""Requests in one row of the table. The C++ has both numbers too."""
MIN_SPARED_KEYS = 1536
"""A range is shared if it spares so many reads of a key: below, what it costs to share takes what it gives."""


@dataclass(frozen=True)
class SharedRange:
    """Keys [first_key, end_key) that all members see, from the same blocks."""

    first_key: int
    end_key: int
    members: np.ndarray
    """int64, which requests of the step: at least two."""

    @property
    def num_spared_keys(self) -> int:
        """Reads of a key that sharing spares."""
        return (len(self.members) - 1) * (self.end_key - self.first_key)


@dataclass(frozen=True)
class SharedKeys:
    """A step's shared ranges as tables for the kernels. One request's ranges follow each other without a gap."""

    tiles_XC: Tensor
    """int32 [X, 2 + TILE_MEMBERS]: first key, end key, requests, and -1 behind the last of them."""
    spans_R2: Tensor
    """int32 [R, 2]: the keys of each request that its ranges cover, first and end."""


def find_shared(
    tables_RB: np.ndarray, num_keys_R: np.ndarray, *, block_size: int, first_key: int = 0
) -> list[SharedRange]:
    """Find what is worth sharing: ranges of few keys for many requests, behind each of them longer ones for fewer.

    num_keys_R: keys that a request may share, those before its first query; 0: it takes no part. first_key: a multiple
    of SHARED_UNIT, before which some request may not see.
    """
    num_blocks_R = num_keys_R // block_size
    found: list[SharedRange] = []
    # Members agree on blocks [first_key // block_size, column); their keys before `start` are in a range already.
    pending = [(np.flatnonzero(num_keys_R >= first_key + SHARED_UNIT), first_key, first_key // block_size)]
    while pending:
        members, start, column = pending.pop()
        if len(members) < 2:
            continue
        blocks_XB = tables_RB[members, column : int(num_blocks_R[members].min())]
        is_same_B = (blocks_XB == blocks_XB[0]).all(0)
        column += len(is_same_B) if is_same_B.all() else int(is_same_B.argmin())
        end = column * block_size // SHARED_UNIT * SHARED_UNIT
        shared = SharedRange(start, end, members)
        if end > start and shared.num_spared_keys >= MIN_SPARED_KEYS:
            found.append(shared)
            start = end
        pending += [
            (part, start, column) for part in _split(tables_RB, members[num_blocks_R[members] > column], column)
        ]
    return sorted(found, key=lambda shared: (shared.first_key, shared.members[0]))


def _split(tables_RB: np.ndarray, members: np.ndarray, column: int) -> list[np.ndarray]:
    """Members that have the same block in a column, for each block that several have."""
    if len(members) < 2:
        return []
    order = np.argsort(tables_RB[members, column], kind="stable")
    blocks = tables_RB[members[order], column]
    parts = np.split(members[order], np.flatnonzero(np.diff(blocks)) + 1)
    return [part for part in parts if len(part) > 1]


def make_tables(ranges: list[SharedRange], num_requests: int, *, num_tiles: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables as SharedKeys has them, filled up to num_tiles with tiles of nobody."""
    tiles_XC = np.full((num_tiles, 2 + TILE_MEMBERS), -1, np.int32)
    spans_R2 = np.zeros((num_requests, 2), np.int32)
    rows = iter(tiles_XC)
    for shared in ranges:
        for members in _tiles_of(shared):
            row = next(rows)
            row[0], row[1], row[2 : 2 + len(members)] = shared.first_key, shared.end_key, members
        is_first = spans_R2[shared.members, 1] == 0
        spans_R2[shared.members[is_first], 0] = shared.first_key
        spans_R2[shared.members, 1] = shared.end_key
    tiles_XC[:, :2][tiles_XC[:, 2] < 0] = 0
    return tiles_XC, spans_R2


def count_tiles(ranges: list[SharedRange]) -> int:
    """How many rows the ranges take in the table."""
    return sum(-(-len(shared.members) // TILE_MEMBERS) for shared in ranges)


def _tiles_of(shared: SharedRange) -> Iterator[np.ndarray]:
    """Equal parts of a range's members."""
    return iter(np.array_split(shared.members, -(-len(shared.members) // TILE_MEMBERS)))
