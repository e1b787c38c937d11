"""What the recurrent ops need to know of a step beside the tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import check_dtype, check_shape
from hybrid_engine.kernels.ssm.pieces import NO_SLOT, Pieces, Put


@dataclass(frozen=True)
class HostFacts:
    """What whoever builds a meta knows of it. Asking a GPU for the same means waiting for the GPU."""

    num_tokens: int
    """T, all tokens of the step."""
    most_queries: int
    """Tokens of a request at most."""
    has_single_queries: bool
    """Whether a request has exactly one."""
    slot_range: tuple[int, int]
    """The lowest and the highest slot that is read or written; (1, 0) when there is none."""

    @classmethod
    def of(cls, num_queries: np.ndarray, slots: Sequence[int]) -> HostFacts:
        """Find it out from each request's tokens and from all slots."""
        return cls(
            num_tokens=int(num_queries.sum()),
            most_queries=int(num_queries.max(initial=0)),
            has_single_queries=bool((num_queries == 1).any()),
            slot_range=(min(slots), max(slots)) if slots else (1, 0),
        )


@dataclass(frozen=True)
class StateMeta:
    """Where each request's tokens and states lie: one for each state group and step.

    A *capture* keeps the state after a given token: S(p), the state after exactly p tokens of a chunk, goes to a slot
    of its own while the working slot goes on to the chunk's end. Slots of one step are all different.
    """

    query_starts: Tensor
    """int32 [R + 1], token offset of each request in the packed batch, then T."""
    slots_R: Tensor
    """int64, working slot of each request: the state before its first token on entry, after its last on return.

    On a GPU a slot below 0 makes a request one that touches nothing and whose outputs are anything.
    """
    has_history_R: Tensor
    """bool; False: the request starts from zeros, whatever its slot holds."""
    capture_ends_C: Tensor
    """int64, sorted: the packed offset just behind the token after which the state is kept."""
    capture_requests_C: Tensor
    """int64, the row of the request that each capture belongs to."""
    capture_slots_C: Tensor
    """int64, the slot that each captured state goes to."""
    known_host: HostFacts | None = None
    """To be left out, or replaced too, where tensors are put in by hand."""
    known_pieces: Pieces | None = None
    """The requests cut for a GPU, if that was done already."""
    is_exact: bool = False
    """Whether a token must give the same bits wherever it is computed: in any chunk, alone or beside others."""

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
            if isinstance(tensor, Tensor) and not tensor.is_contiguous():
                raise ShapeError(f"{name} must be contiguous")

    @cached_property
    def host(self) -> HostFacts:
        """What the tensors say of the step as a whole."""
        if self.known_host is not None:
            return self.known_host
        slots = torch.cat([self.slots_R, self.capture_slots_C]).tolist()
        return HostFacts.of(self.query_starts.diff().cpu().numpy(), slots)

    def pieces(self, size: int) -> Pieces:
        """The requests in pieces of at most so many tokens."""
        if self.known_pieces is not None and self.known_pieces.size == size:
            return self.known_pieces
        captures = zip(self.capture_ends_C.tolist(), self.capture_slots_C.tolist(), strict=True)
        put = partial(torch.as_tensor, device=self.slots_R.device)
        return Pieces.build(self.query_starts.tolist(), list(captures), size=size, put=put)

    @classmethod
    def build(
        cls,
        *,
        num_queries: Sequence[int],
        slots: Sequence[int],
        has_history: Sequence[bool],
        captures: Sequence[tuple[int, int, int]] = (),
        put: Put = torch.as_tensor,
        piece_size: int | None = None,
        num_padding: int = 0,
        is_exact: bool = False,
    ) -> StateMeta:
        """Make the tensors from plain lists, one entry a request.

        captures: (row, num_tokens, slot) in any order: S(num_tokens of the row's chunk) goes to the slot.
        put: brings an array to where the ops run, if that isn't torch's default device.
        piece_size: cut the requests now, for scans with chunks of this size on a GPU.
        num_padding: requests to add behind, of one token each, that touch nothing: on a GPU alone.
        Raises ShapeError when a capture lies outside its chunk or a slot is written twice.
        """
        captures = sorted(captures)
        _check_captures(captures, num_queries)
        _check_slots([*slots, *(slot for _, _, slot in captures)])
        all_slots = [*slots, *(slot for _, _, slot in captures)]
        num_queries = [*num_queries, *[1] * num_padding]
        slots = [*slots, *[NO_SLOT] * num_padding]
        has_history = [*has_history, *[False] * num_padding]
        starts = np.zeros(len(num_queries) + 1, np.int32)
        np.cumsum(num_queries, out=starts[1:])
        rows, num_tokens, capture_slots = np.asarray(captures, np.int64).reshape(-1, 3).T
        ends = starts[rows] + num_tokens
        pieces = None
        if piece_size is not None and max(num_queries, default=0) > 1:
            kept = list(zip(ends.tolist(), capture_slots.tolist(), strict=True))
            pieces = Pieces.build(starts.tolist(), kept, size=piece_size, put=put)
        return cls(
            query_starts=put(starts),
            slots_R=put(np.asarray(slots, np.int64)),
            has_history_R=put(np.asarray(has_history, np.bool_)),
            capture_ends_C=put(ends),
            capture_requests_C=put(np.ascontiguousarray(rows)),
            capture_slots_C=put(np.ascontiguousarray(capture_slots)),
            known_host=HostFacts.of(np.asarray(num_queries, np.int64), all_slots),
            known_pieces=pieces,
            is_exact=is_exact,
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
