"""Steps that begin before the host knows the tokens of the step before: those wait on the device, a place a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.runner.batch import BatchState, PackedBatch
from hybrid_engine.runner.sampler import RequestSampling
from hybrid_engine.step_plan import StepResult

UNKNOWN = -1
"""Stands among the host's tokens for one that only the device knows."""


class NewestTokens:
    """Each row's newest token, on the device. Rows are those of BatchState; the last place is nobody's."""

    def __init__(self, device: torch.device, *, num_rows: int) -> None:
        self.num_rows = num_rows
        self._token_ids_X = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)

    def put_in(self, packed: PackedBatch) -> PackedBatch:
        """Return a step of one token a request with the tokens that the host doesn't know."""
        newest_T = self._token_ids_X[packed.rows_T.clamp(max=self.num_rows)]
        known_T = packed.token_ids_T
        return replace(packed, token_ids_T=torch.where(known_T == UNKNOWN, newest_T, known_T))

    def note(self, packed: PackedBatch, token_ids_R: Tensor) -> None:
        """Keep what a step has chosen. One below 0 is an error that the host will find: it must not be looked up."""
        self._token_ids_X.index_copy_(0, packed.rows_T[: len(token_ids_R)], token_ids_R.clamp(min=0))


class Readback:
    """Numbers on their way from the device to pinned memory."""

    def __init__(self, numbers_R: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if numbers_R.device.type != "cuda":
            self._host_R = numbers_R.clone()
            return
        self._host_R = torch.empty(numbers_R.shape, dtype=numbers_R.dtype, pin_memory=True)
        self._host_R.copy_(numbers_R, non_blocking=True)
        self._event = torch.cuda.Event()
        self._event.record()

    def tolist(self) -> list[int]:
        """Wait for them."""
        if self._event is not None:
            self._event.synchronize()
        return self._host_R.tolist()


@dataclass
class Begun:
    """A step whose tokens are on their way. Steps are finished in the order in which they began."""

    step_id: int
    rows: np.ndarray
    requests: Sequence[RequestSampling]
    positions: Sequence[int]
    readback: Readback
    result: StepResult | None = None

    def finish(self, batch: BatchState) -> StepResult:
        """Wait for the tokens, and let the host know them; at once if that was done before."""
        if self.result is None:
            token_ids = self.readback.tolist()
            wrong = [request.request_id for request, token in zip(self.requests, token_ids, strict=True) if token < 0]
            assert not wrong, f"highest logits not finite, of {wrong}"
            batch.learn_tokens(self.rows, self.requests, self.positions, token_ids)
            self.result = StepResult(self.step_id, {})
            for request, token in zip(self.requests, token_ids, strict=True):
                self.result.sampled[request.request_id] = (token,)
        return self.result
