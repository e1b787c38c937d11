"""Requests cut into pieces that a GPU scans side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from torch import Tensor

NO_SLOT = -1

Put = Callable[[np.ndarray], Tensor]
"""Brings an array to where the kernels run."""


@dataclass(frozen=True)
class Pieces:
    """The requests with several tokens, cut into pieces of at most `size` tokens. A piece ends at every capture.

    Requests with one token are left out: they take one step, which needs no pieces.
    """

    size: int
    count: int
    bounds: Tensor
    """int32 [count, 2]: the first token's packed offset, and the number of tokens."""
    slots: Tensor
    """int64 [count]: where the state behind the piece is kept; NO_SLOT: nowhere."""
    row_pieces: Tensor
    """int32 [R + 1]: each request's first piece, then `count`."""

    @classmethod
    def build(cls, starts: Sequence[int], captures: Sequence[tuple[int, int]], *, size: int, put: Put) -> Pieces:
        """Cut. starts: packed offset of each request, then T. captures: (packed end, slot), sorted by the end.

        A second capture at the same position gets a piece of no tokens.
        """
        bounds: list[tuple[int, int]] = []
        slots: list[int] = []
        row_pieces = [0]
        waiting = list(reversed(captures))
        for start, end in pairwise(starts):
            is_cut = end - start > 1
            while start < end or (waiting and waiting[-1][0] == end):
                capture_end, slot = waiting[-1] if waiting else (end + 1, NO_SLOT)
                stop = min(start + size, capture_end, end)
                is_captured = stop == capture_end
                if is_captured:
                    waiting.pop()
                if is_cut:
                    bounds.append((start, stop - start))
                    slots.append(slot if is_captured else NO_SLOT)
                start = stop
            row_pieces.append(len(bounds))
        return cls(
            size,
            len(bounds),
            put(np.array(bounds, np.int32).reshape(-1, 2)),
            put(np.array(slots, np.int64)),
            put(np.array(row_pieces, np.int32)),
        )
