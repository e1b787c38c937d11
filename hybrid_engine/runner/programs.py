"""Decode steps on a CPU as recordings: the same calls into C++ again, without the Python that prepared them.

A recording is for a number of requests, and for keys up to a power of two. It knows its inputs by their addresses:
a step's arrays are written into the tensors that were there when it was made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.kernels.native import Recording, num_threads, recorded
from hybrid_engine.models.base import ForwardBatch, Model
from hybrid_engine.models.decoder import Decoder, LookedUp
from hybrid_engine.runner.batch import BatchState, DecodeShape, PackedBatch
from hybrid_engine.runner.staging import Staging
from hybrid_engine.step_plan import StepPlan

MOST_REQUESTS = 32
"""Steps of more are long enough for Python not to matter."""
MOST_BYTES, MOST_PROGRAMS = 8 << 20, 16
"""Of a program's own tensors; programs kept, those used last."""

MakeBatch = Callable[[PackedBatch], ForwardBatch]


class FixedStaging(Staging):
    """Gives each step's arrays the same tensors: the n-th put() of a step returns the n-th tensor, written anew."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self._arrays: list[np.ndarray] = []
        self._num_put = 0

    def begin(self) -> None:
        """Start a step."""
        self._num_put = 0

    def put(self, array: np.ndarray) -> Tensor:
        """Take an array, of the shape and dtype that it had in the steps before."""
        if self._num_put == len(self._arrays):
            self._arrays.append(array.copy())
        kept = self._arrays[self._num_put]
        assert (kept.shape, kept.dtype) == (array.shape, array.dtype), (kept.shape, array.shape, array.dtype)
        np.copyto(kept, array)
        self._num_put += 1
        return torch.from_numpy(kept)


@dataclass(frozen=True)
class _Program:
    staging: FixedStaging
    looked_up: LookedUp
    recording: Recording
    hidden_TE: Tensor


class DecodePrograms:
    """The recorded decode steps of one model and its caches."""

    def __init__(self, model: Decoder, batch: BatchState, make_batch: MakeBatch) -> None:
        self._model = model
        self._batch = batch
        self._make_batch = make_batch
        self._programs: OrderedDict[tuple[DecodeShape, int], _Program] = OrderedDict()
        self._can_record = True

    def covers(self, plan: StepPlan) -> bool:
        """Whether each request of the plan computes and samples one token, and no state is kept on the way."""
        return (
            self._can_record
            and 0 < len(plan.request_ids) <= MOST_REQUESTS
            and all(plan.is_sampled)
            and max(plan.num_scheduled_tokens) == 1
            and not plan.state_captures
        )

    def run(self, plan: StepPlan) -> tuple[PackedBatch, Tensor]:
        """Compute a step that is covered: its input, and hidden_TE, which the next step overwrites."""
        # No requests that fill it up: a CPU gains nothing by fewer recordings.
        shape = replace(self._batch.decode_shape(plan), num_requests=len(plan.request_ids))
        program = self._programs.get((shape, num_threads()))
        if program is None:
            return self._record(plan, shape)
        self._programs.move_to_end((shape, num_threads()))
        packed = self._batch.pack(plan, staging=program.staging, shape=shape)
        looked_up = self._model.look_up(self._make_batch(packed))
        for ours, new in zip(program.looked_up.tensors(), looked_up.tensors(), strict=True):
            ours.copy_(new)
        program.recording.play()
        return packed, program.hidden_TE

    def _record(self, plan: StepPlan, shape: DecodeShape) -> tuple[PackedBatch, Tensor]:
        staging = FixedStaging()
        packed = self._batch.pack(plan, staging=staging, shape=shape)
        batch = self._make_batch(packed)
        looked_up = self._model.look_up(batch)
        with recorded() as recording:
            hidden_TE = self._model.run_layers(looked_up, batch)
        if recording.obstacle is not None:
            self._can_record = False
        elif recording.num_bytes <= MOST_BYTES:
            self._programs[shape, num_threads()] = _Program(staging, looked_up, recording, hidden_TE)
            if len(self._programs) > MOST_PROGRAMS:
                self._programs.popitem(last=False)
        return packed, hidden_TE


def has_programs(model: Model) -> TypeGuard[Decoder]:
    """Whether a model's decode steps can be recorded, as far as its kind tells."""
    is_plain = isinstance(model, Decoder) and type(model).forward is Decoder.forward
    return is_plain and model.is_recordable and not any(layer.num_experts for layer in model.info.layers)
