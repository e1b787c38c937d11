"""A prefix benchmark with real weights: every step is computed and timed, and every answer is the workload's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import numpy as np

from hybrid_engine.bench.token_free import TokenFreeRequest
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import Model
from hybrid_engine.models.registry import load_model
from hybrid_engine.request import Request
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.runner.sampler import RequestSampling, Sampler
from hybrid_engine.startup import DTYPES, check_device
from hybrid_engine.step_plan import StepPlan, StepResult
from hybrid_engine.weights import open_checkpoint


class ToldSampler(Sampler):
    """Chooses what it was told to, whatever the logits are."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__(vocab_size)
        self.answers: dict[str, Sequence[int]] = {}

    def sample(
        self, logits_RV: np.ndarray, requests: Sequence[RequestSampling], positions: Sequence[int]
    ) -> np.ndarray:
        chosen = [
            self.answers[request.request_id][position - request.num_prompt_tokens]
            for request, position in zip(requests, positions, strict=True)
        ]
        return np.array(chosen, np.int64)


class MeasuredRunner:
    """Runs a model on a coordinator's cache memory; steps take as long as they take."""

    def __init__(self, model: Model, coordinator: Coordinator, *, device: str = "cpu") -> None:
        self._runner = ModelRunner(model, coordinator.groups, coordinator.memory.layout, device=device)
        self._vocab_size = model.info.vocab_size
        self._sampler = ToldSampler(self._vocab_size)
        self._runner._sampler = self._sampler

    def begin(self, request: Request, answer: Iterator[int]) -> None:
        if isinstance(request, TokenFreeRequest):
            raise ConfigError(
                "a model can't compute prompts of which only the identities of blocks are known: take a trace with "
                "texts, or a clock instead of the model"
            )
        tokens = [token_id % self._vocab_size for token_id in islice(answer, request.sampling.max_tokens)]
        largest = max(request.token_ids)
        if largest >= self._vocab_size:
            raise ConfigError(
                f"a prompt has token {largest:,}, the model's vocabulary has {self._vocab_size:,}: tokenise the trace "
                f"with the model's own tokenizer"
            )
        self._sampler.answers[request.request_id] = tokens

    def execute(self, plan: StepPlan, *, most_steps: int, most_s: float) -> StepResult:
        return self._runner.execute(plan)

    def end(self, request: Request) -> None:
        del self._sampler.answers[request.request_id]


def load(path: str | Path, *, device: str = "cpu") -> Model:
    """Load a checkpoint's weights, in bfloat16. Raises CheckpointError or ConfigError."""
    check_device(device)
    return load_model(open_checkpoint(path), dtype=DTYPES["bfloat16"], device=device)
