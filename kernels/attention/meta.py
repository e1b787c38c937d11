"""What attention needs to know of a step beside the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import check_dtype, check_shape


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

    @classmethod
    def build(
        cls,
        *,
        num_queries: Sequence[int],
        num_keys: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        block_size: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMeta:
        """Make the tensors from plain lists, one entry a request."""
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
        return cls(
            query_starts=torch.from_numpy(starts).to(device),
            num_keys=torch.tensor(list(num_keys), dtype=torch.int32, device=device),
            block_tables_RB=torch.from_numpy(tables_RB).to(device),
            slots_T=torch.from_numpy(slots_T).to(device),
        )
