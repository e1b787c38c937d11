"""What attention needs to know of a step beside the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.attention.shared import TILE_MEMBERS, SharedKeys, count_tiles, find_shared, make_tables
from hybrid_engine.kernels.checks import check_dtype, check_shape


@dataclass(frozen=True)
class Extent:
    """How far a step reaches: what a grid of programs is sized by."""

    most_queries: int
    """Of one request."""
    most_keys_of_single_queries: int
    """Of a request with one query; 0 when there is none."""

    @classmethod
    def of(cls, num_queries: np.ndarray, num_keys: np.ndarray) -> Extent:
        """Find it out from each request's counts."""
        return cls(int(num_queries.max(initial=0)), int(num_keys[num_queries == 1].max(initial=0)))


@dataclass(frozen=True)
class AttentionMeta:
    """Where each request's queries, keys and new slots lie: one for each cache group and step.

    Query j of a request with n queries stands at position num_keys - n + j.
    """

    query_starts: Tensor
    """int32 [R + 1], token offset of each request's queries in the packed batch, then T."""
    num_keys: Tensor
    """int32 [R], keys of each request once this step's are written: the position of its last query + 1."""
    block_tables_RB: Tensor
    """int32, block index of each request's k-th block. Entries whose keys no query sees may hold anything."""
    slots_T: Tensor
    """int64, where each new token's key and value go: block index * P + offset."""
    known_extent: Extent | None = None
    """Whoever builds the meta on the host knows it; asking a GPU for it means waiting for the GPU."""
    shared: SharedKeys | None = None
    """Keys to read once for several requests; None: each reads its own. It changes no result, only its speed."""

    is_exact: bool = False
    """Whether a query must give the same bits wherever it is computed: in any chunk, alone or beside others."""

    def __post_init__(self) -> None:
        """Raise ShapeError when the tensors don't fit each other: checked here once, not in every layer."""
        num_requests = self.num_keys.shape[0]
        check_shape("num_keys", self.num_keys, None)
        check_shape("query_starts", self.query_starts, num_requests + 1)
        check_shape("block_tables_RB", self.block_tables_RB, num_requests, None)
        check_shape("slots_T", self.slots_T, None)
        check_dtype("slots_T", self.slots_T, torch.int64)
        for name in ("query_starts", "num_keys", "block_tables_RB"):
            check_dtype(name, getattr(self, name), torch.int32)
        if not (self.query_starts.is_contiguous() and self.num_keys.is_contiguous()):
            raise ShapeError("query_starts and num_keys must be contiguous")
        if self.shared is not None:
            check_shape("tiles_XC", self.shared.tiles_XC, None, 2 + TILE_MEMBERS)
            check_shape("spans_R2", self.shared.spans_R2, num_requests, 2)
            check_dtype("tiles_XC", self.shared.tiles_XC, torch.int32)
            check_dtype("spans_R2", self.shared.spans_R2, torch.int32)

    @cached_property
    def extent(self) -> Extent:
        """How far the step reaches."""
        if self.known_extent is not None:
            return self.known_extent
        return Extent.of(self.query_starts.diff().cpu().numpy(), self.num_keys.cpu().numpy())

    def positions(self) -> Tensor:
        """int64 [T], each query's position."""
        num_queries = self.query_starts.diff()
        shifts = self.num_keys - self.query_starts[1:]
        num_tokens = self.slots_T.shape[0]
        token_shifts = shifts.repeat_interleave(num_queries, output_size=num_tokens)
        return torch.arange(num_tokens, device=token_shifts.device) + token_shifts

    @classmethod
    def build(
        cls,
        *,
        num_queries: Sequence[int],
        num_keys: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str | None = None,
        is_shared: bool = False,
        is_exact: bool = False,
    ) -> AttentionMeta:
        """Make the tensors from plain lists, one entry a request. device: torch's default one when None.

        is_shared: let requests of one query share the keys that they see alike, which no window may hide.
        """
        starts = np.zeros(len(num_queries) + 1, np.int32)
        np.cumsum(num_queries, out=starts[1:])
        tables_RB = np.zeros((len(block_tables), max(map(len, block_tables), default=0)), np.int32)
        for row, table in zip(tables_RB, block_tables, strict=True):
            row[: len(table)] = table
        rows_T = np.repeat(np.arange(len(num_queries)), num_queries)
        # position = num_keys - num_queries + (token - start)
        shifts = np.asarray(num_keys, np.int64) - starts[1:]
        positions_T = np.arange(starts[-1]) + shifts[rows_T]
        slots_T = tables_RB[rows_T, positions_T // block_size].astype(np.int64) * block_size + positions_T % block_size
        keys_R = np.asarray(num_keys, np.int32)
        query_starts, num_keys_R, block_tables_RB, slots = (
            torch.as_tensor(array, device=device) for array in (starts, keys_R, tables_RB, slots_T)
        )
        extent = Extent.of(np.asarray(num_queries, np.int32), keys_R)
        shared = None
        if is_shared:
            own_keys_R = np.where(np.asarray(num_queries) == 1, keys_R - 1, 0)
            ranges = find_shared(tables_RB, own_keys_R, block_size=block_size)
            if ranges:
                tables = make_tables(ranges, len(keys_R), num_tiles=count_tiles(ranges))
                shared = SharedKeys(*(torch.as_tensor(table, device=device) for table in tables))
        return cls(
            query_starts, num_keys_R, block_tables_RB, slots, known_extent=extent, shared=shared, is_exact=is_exact
        )
