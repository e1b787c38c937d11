"""What the recurrent ops need to know of a step beside the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import check_dtype, check_shape


@dataclass(frozen=True)
class StateMeta:
    """Where each request's tokens and states lie: one for each state group and step.

    A *capture* keeps the state after a given token: S(p), the state after exactly p tokens of a chunk, goes to a slot
    of its own while the working slot goes on to the chunk's end. Slots of one step are all different.
    """

    query_starts: Tensor
    """int32 [R + 1], token offset of each request in the packed batch, then T."""
    slots_R: Tensor
    """int64, working slot of each request: the state before its first token on entry, after its last on return."""
    has_history_R: Tensor
    """bool; False: the request starts from zeros, whatever its slot holds."""
    capture_ends_C: Tensor
    """int64, sorted: the packed offset just behind the token after which the state is kept."""
    capture_requests_C: Tensor
    """int64, the row of the request that each capture belongs to."""
    capture_slots_C: Tensor
    """int64, the slot that each captured state goes to."""

    def __post_init__(self) -> None:
        """Raise ShapeError when the tensors don't fit each other: checked here once, not in every layer."""
        check_shape("slots_R", self.slots_R, None)
        check_shape("query_starts", self.query_starts, len(self.slots_R) + 1)
        check_shape("has_history_R", self.has_history_R, len(self.slots_R))
        check_shape("capture_ends_C", self.capture_ends_C, None)
        check_dtype("query_starts", self.query_starts, torch.int32)
        check_dtype("slots_R", self.slots_R, torch.int64)
        check_dtype("has_history_R", self.has_history_R, torch.bool)
        for name in ("capture_ends_C", "capture_requests_C", "capture_slots_C"):
            check_dtype(name, getattr(self, name), torch.int64)
            check_shape(name, getattr(self, name), len(self.capture_ends_C))
        for name, tensor in vars(self).items():
            if not tensor.is_contiguous():
                raise ShapeError(f"{name} must be contiguous")

    @cached_property
    def slot_range(self) -> tuple[int, int]:
        """The lowest and the highest slot of the step; (1, 0) when there is none."""
        slots = torch.cat([self.slots_R, self.capture_slots_C])
        return (int(slots.min()), int(slots.max())) if len(slots) else (1, 0)

    @cached_property
    def num_tokens(self) -> int:
        """T, all tokens of the step."""
        return int(self.query_starts[-1])

    @classmethod
    def build(
        cls,
        *,
        num_queries: Sequence[int],
        slots: Sequence[int],
        has_history: Sequence[bool],
        captures: Sequence[tuple[int, int, int]] = (),
        device: torch.device | str = "cpu",
    ) -> StateMeta:
        """Make the tensors from plain lists, one entry a request.

        captures: (row, num_tokens, slot) in any order: S(num_tokens of the row's chunk) goes to the slot.
        Raises ShapeError when a capture lies outside its chunk or a slot is written twice.
        """
        captures = sorted(captures)
        _check_captures(captures, num_queries)
        _check_slots([*slots, *(slot for _, _, slot in captures)])
        starts = np.zeros(len(num_queries) + 1, np.int32)
        np.cumsum(num_queries, out=starts[1:])
        rows, num_tokens, capture_slots = np.asarray(captures, np.int64).reshape(-1, 3).T
        ends = starts[rows] + num_tokens

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array)).to(device)

        return cls(
            query_starts=put(starts),
            slots_R=put(np.asarray(slots, np.int64)),
            has_history_R=put(np.asarray(has_history, np.bool_)),
            capture_ends_C=put(ends),
            capture_requests_C=put(rows),
            capture_slots_C=put(capture_slots),
        )


def _check_captures(captures: Sequence[tuple[int, int, int]], num_queries: Sequence[int]) -> None:
    for row, num_tokens, slot in captures:
        if not 0 <= row < len(num_queries):
            raise ShapeError(f"a capture names row {row}, there are {len(num_queries)}")
        if not 1 <= num_tokens <= num_queries[row]:
            raise ShapeError(
                f"the capture to slot {slot} is after {num_tokens} tokens, must be within [1, {num_queries[row]}]"
            )


def _check_slots(slots: Sequence[int]) -> None:
    """Slot 0 is the null slot; two writers of a slot would leave it to chance which state it holds."""
    if slots and min(slots) < 1:
        raise ShapeError(f"slot {min(slots)} can't hold a state: slot 0 is the null slot")
    if len(set(slots)) < len(slots):
        raise ShapeError(f"slots {sorted(slots)} of one step must all be different")
