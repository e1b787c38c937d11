"""Which keys of one group several requests of a step read alike, so that attention reads them once for all of them."""

from __future__ import annotations

import numpy as np

from hybrid_engine.groups.spec import ChunkedLocalSpec, SlidingWindowSpec
from hybrid_engine.kernels.attention.shared import SHARED_UNIT, SharedRange, find_shared
from hybrid_engine.runner.block_tables import BlockTables


class SharedPrefixes:
    """Looks at the tables anew only when a request came, went or was moved; else a step costs a comparison."""

    def __init__(self, tables: BlockTables, most_queries: int) -> None:
        """most_queries: of a request that can share; those with more have rows enough by themselves. 0: nobody can."""
        self._tables = tables
        self._most_queries = most_queries
        self._key: object = None
        self._found: list[SharedRange] = []

    def find(self, rows: np.ndarray, num_queries: np.ndarray, num_keys: np.ndarray) -> list[SharedRange]:
        """Return what is worth sharing among the requests of these rows; members are places in `rows`."""
        is_sharer = num_queries <= self._most_queries
        if np.count_nonzero(is_sharer) < 2:
            return []
        num_before = np.where(is_sharer, num_keys - num_queries, 0)
        first_key = self._first_key(num_before)
        key = (rows.tobytes(), is_sharer.tobytes(), first_key, self._tables.num_changes)
        if key != self._key:
            # Later steps know more keys, and begin with the same blocks: what is found now holds until the key changes.
            self._key = key
            self._found = find_shared(
                self._tables.gather(rows, num_keys),
                num_before,
                block_size=self._tables.group.block_size,
                first_key=first_key,
            )
        return self._found

    def _first_key(self, num_before: np.ndarray) -> int:
        """The first unit that is inside of everybody's window."""
        spec, furthest = self._tables.group.spec, int(num_before.max())
        lowest = 0
        if isinstance(spec, SlidingWindowSpec):
            lowest = max(0, furthest - spec.window + 1)
        elif isinstance(spec, ChunkedLocalSpec):
            lowest = furthest // spec.chunk * spec.chunk
        return -(-lowest // SHARED_UNIT) * SHARED_UNIT
