"""Decode steps as CUDA graphs: the launches of a whole forward are recorded once and played at one call.

A graph is for a number of requests, of keys and of tiles of shared keys, all rounded up. Requests that fill up the
number touch nothing: their tokens go to no slot, their states to none, and nobody reads what comes out for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_engine.kernels.attention import AttentionMeta, has_kernels
from hybrid_engine.models.base import LayerInfo, Model
from hybrid_engine.runner.batch import BatchState, DecodeShape, PackedBatch
from hybrid_engine.runner.sampler import greedy_tokens
from hybrid_engine.runner.staging import Staging
from hybrid_engine.step_plan import StepPlan

Forward = Callable[[PackedBatch], Tensor]
"""Runs the model on a batch: logits of all its tokens."""


def can_be_recorded(model: Model) -> bool:
    """Whether a model's decode steps are the same launches whatever its tokens are: with experts they aren't."""
    layers = model.info.layers
    return model.is_recordable and not any(layer.num_experts for layer in layers) and all(map(_has_kernels, layers))


def _has_kernels(layer: LayerInfo) -> bool:
    """Whether torch, which asks the GPU for numbers, has no part in a layer."""
    sizes = {"head_size": layer.head_size, "value_size": layer.attended_value_size}
    return layer.num_heads == 0 or layer.recurrent is not None or has_kernels("cuda", **sizes)


@dataclass(frozen=True)
class Decoded:
    """What a decode step gave, for the requests of the plan."""

    packed: PackedBatch
    logits_RV: Tensor
    """float32, overwritten by the next step."""
    token_ids_R: Tensor
    """As greedy_tokens has them."""


@dataclass(frozen=True)
class _Recording:
    graph: torch.cuda.CUDAGraph
    staging: Staging
    logits_RV: Tensor
    token_ids_R: Tensor


class DecodeGraphs:
    """The graphs of one model and its caches, recorded as they are needed."""

    def __init__(self, batch: BatchState, forward: Forward) -> None:
        self._batch = batch
        self._forward = forward
        self._recordings: dict[DecodeShape, _Recording] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def covers(self, plan: StepPlan) -> bool:
        """Whether each request of the plan computes and samples one token, and no state is kept on the way."""
        return (
            len(plan.request_ids) > 0
            and all(plan.is_sampled)
            and max(plan.num_scheduled_tokens) == 1
            and not plan.state_captures
        )

    def run(self, plan: StepPlan) -> Decoded:
        """Play the graph that fits the plan."""
        shape = self._batch.decode_shape(plan)
        recording = self._recordings.get(shape)
        if recording is None:
            recording = self._recordings[shape] = self._record(plan, shape)
        packed = self._batch.pack(plan, staging=recording.staging, shape=shape)
        recording.graph.replay()
        num_requests = len(plan.request_ids)
        return Decoded(packed, recording.logits_RV[:num_requests], recording.token_ids_R[:num_requests])

    def _record(self, plan: StepPlan, shape: DecodeShape) -> _Recording:
        # Twice: the second time there is room for all in one piece.
        trial = Staging(self._batch.device)
        self._batch.pack(plan, staging=trial, shape=shape)
        staging = Staging(self._batch.device, num_bytes=2 * trial.num_bytes)
        packed = self._batch.pack(plan, staging=staging, shape=shape)
        _touch_nothing(packed)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # compiles and sets up what a recording can't
            greedy_tokens(self._forward(packed))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits_RV = self._forward(packed)
            token_ids_R = greedy_tokens(logits_RV)
        return _Recording(graph, staging, logits_RV, token_ids_R)


def _touch_nothing(packed: PackedBatch) -> None:
    """Make all requests of a batch on the device such as fill up."""
    for meta in packed.metas:
        if isinstance(meta, AttentionMeta):
            meta.slots_T.fill_(-1)
            meta.num_keys.fill_(0)
            if meta.shared is not None:
                meta.shared.tiles_XC.fill_(-1)
        else:
            meta.slots_R.fill_(-1)
