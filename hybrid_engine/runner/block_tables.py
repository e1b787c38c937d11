"""The block tables that a runner mirrors, by group, a row for each request that it knows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType

import numpy as np

from hybrid_engine.groups.spec import Group
from hybrid_engine.step_plan import NULL_BLOCK_ID, BlockId, BlockMove

Row = NewType("Row", int)
"""Where a known request stands in the arrays. Neither its place in a plan nor anything of its blocks."""

FIRST_ROWS, _FIRST_BLOCKS = 8, 16


class BlockTables:
    """The block tables of one group, by row. In a state group: the request's working slot, then its draft slots."""

    def __init__(self, group: Group, num_ids: int) -> None:
        """num_ids: all block ids are below it."""
        self.group = group
        self.num_ids = num_ids
        self.num_changes = 0
        """How often anything but the end of a table became another."""
        self._ids = np.full((FIRST_ROWS, _FIRST_BLOCKS), NULL_BLOCK_ID, np.int32)
        self._lengths = np.zeros(FIRST_ROWS, np.int64)

    def grow_rows(self, num_rows: int) -> None:
        """Make place for so many requests."""
        self._ids = grown(self._ids, num_rows, self._ids.shape[1])
        self._lengths = np.resize(self._lengths, num_rows)

    def start(self, row: Row, block_ids: Sequence[BlockId]) -> None:
        """Set a row's whole table."""
        self.num_changes += 1
        self._ids[row] = NULL_BLOCK_ID
        self._lengths[row] = 0
        self.append(row, block_ids)

    def append(self, row: Row, block_ids: Sequence[BlockId]) -> None:
        """Put blocks at the end of a row's table."""
        ids = np.array(block_ids, np.int64)
        assert ((ids >= NULL_BLOCK_ID) & (ids < self.num_ids)).all(), (
            f"blocks {block_ids} of group {self.group.group_id}, which has ids below {self.num_ids}"
        )
        start, end = self._lengths[row], self._lengths[row] + len(ids)
        self._ids = grown(self._ids, len(self._ids), end)
        self._ids[row, start:end] = ids
        self._lengths[row] = end

    def move(self, moves: Sequence[BlockMove]) -> None:
        """Let blocks lie elsewhere, one move after the other.

        A place may be left and then be that of a block which no table has yet, and which is moved on as well.
        """
        self.num_changes += 1
        target_of: dict[int, int] = {}
        # Who lies where by now: where it lay before, None: nobody that a table has. Elsewhere nothing has changed.
        occupants: dict[int, int | None] = {}
        for move in moves:
            occupant = occupants.get(move.source_id, move.source_id)
            occupants[move.source_id], occupants[move.target_id] = None, occupant
            if occupant is not None:
                target_of[occupant] = move.target_id
        sources = np.array(sorted(target_of), np.int32)
        targets = np.array([target_of[source] for source in sources.tolist()], np.int32)
        index = np.minimum(np.searchsorted(sources, self._ids), len(sources) - 1)
        self._ids = np.where(sources[index] == self._ids, targets[index], self._ids)

    def gather(self, rows: np.ndarray, num_keys: np.ndarray) -> np.ndarray:
        """Return the tables of these rows, int32, as wide as the longest of num_keys needs."""
        block_size = self.group.block_size
        num_slots = self._lengths[rows] * block_size
        assert (num_slots >= num_keys).all(), (
            f"{num_keys.tolist()} keys in tables of {num_slots.tolist()} slots, group {self.group.group_id}"
        )
        return self._ids[rows, : -(-int(num_keys.max()) // block_size)]

    def state_slots(self, rows: np.ndarray, num_drafts: np.ndarray) -> np.ndarray:
        """Return the slots of these rows: the working one first, then those of so many drafts."""
        lengths = self._lengths[rows]
        assert (lengths > num_drafts).all(), (
            f"{lengths.tolist()} state slots for one working state each and {num_drafts.tolist()} drafts, "
            f"group {self.group.group_id}"
        )
        slots = self._ids[rows, : 1 + int(num_drafts.max())]
        is_used = np.arange(slots.shape[1]) <= num_drafts[:, None]
        assert (slots[is_used] != NULL_BLOCK_ID).all(), f"the null slot for a state, group {self.group.group_id}"
        return slots


def grown(array: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """Return the array, or its content in one with room for so many rows and at least so many columns."""
    old_rows, old_columns = array.shape
    if num_rows <= old_rows and num_columns <= old_columns:
        return array
    columns = old_columns if num_columns <= old_columns else max(2 * old_columns, num_columns)
    grown = np.zeros((num_rows, columns), array.dtype)
    grown[:old_rows, :old_columns] = array
    return grown
