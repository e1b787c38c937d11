"""Executes plans: one forward over everything a plan lists, then the next token of each request that is due one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.groups.spec import Group
from hybrid_engine.kernels import native
from hybrid_engine.models.base import ForwardBatch, Model
from hybrid_engine.runner.batch import BatchState, PackedBatch
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.runner.sampler import RequestSampling, Sampler
from hybrid_engine.step_plan import StepPlan, StepResult, TokenLogprobs
from hybrid_engine.structured import Grammars

MAX_LOGITS_BYTES = 64 << 20
"""Prompt log-probabilities need logits at every token; they are made in slices of at most so many bytes."""


class ModelRunner:
    """A model with its cache memory. Knows the requests that plans have told it of, and nothing of why they run."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[Group],
        num_blocks: Sequence[int],
        *,
        device: torch.device | str = "cpu",
        eos_token_ids: Iterable[int] | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """num_blocks: usable blocks of each group; the null block comes on top.

        eos_token_ids: what min_tokens forbids unless a request ignores it; None: the model's own.
        grammars: of the model's tokenizer; None: no request asks for structured outputs.
        Raises CapacityError when the cache memory can't be had.
        """
        # All at once and before the first request, who would else wait for a compiler.
        native.prepare()
        self.model = model
        self.cache = CacheTensors(groups, num_blocks, dtype=model.dtype, device=device)
        num_layers = len(model.info.layers)
        assert len(self.cache.layers) == num_layers, f"groups hold {len(self.cache.layers)} of {num_layers} layers"
        group_of = {layer: group_id for group_id, group in enumerate(groups) for layer in group.layer_indices}
        self._group_of_layer = [group_of[layer] for layer in range(num_layers)]
        self._sampler = Sampler(
            model.info.vocab_size,
            eos_token_ids=model.info.eos_token_ids if eos_token_ids is None else eos_token_ids,
            grammars=grammars,
        )
        self._batch = BatchState(groups, num_blocks, vocab_size=model.info.vocab_size, device=device)
        self.num_steps_total = 0
        """Steps that computed anything."""
        self.num_computed_tokens_total = 0
        """Tokens computed, those computed again after a preemption counted again."""

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all that the plan lists and sample where it says so."""
        self._batch.apply(plan, self._sampler.prepare)
        self.cache.copy_blocks(plan.block_copies)
        result = StepResult(plan.step_id, {})
        if not plan.request_ids:
            return result
        packed = self._batch.pack(plan)
        hidden_TE = self.model(
            ForwardBatch(
                token_ids_T=packed.token_ids_T,
                positions_T=packed.positions_T,
                metas=tuple(packed.metas[group_id] for group_id in self._group_of_layer),
                caches=self.cache.layers,
            )
        )
        self.num_steps_total += 1
        self.num_computed_tokens_total += len(hidden_TE)
        self._find_prompt_logprobs(plan, packed, hidden_TE, result)
        self._sample(plan, packed, hidden_TE, result)
        return result

    def _sample(self, plan: StepPlan, packed: PackedBatch, hidden_TE: Tensor, result: StepResult) -> None:
        sampled = np.flatnonzero(plan.is_sampled)
        if len(sampled) == 0:
            return
        if len(sampled) < len(hidden_TE):
            last_tokens = torch.from_numpy(packed.starts[sampled + 1] - 1)
            hidden_TE = hidden_TE[last_tokens.to(hidden_TE.device)]
        logits_RV = self.model.logits(hidden_TE).cpu().numpy()
        rows = packed.rows[sampled]
        requests = [self._batch.sampling(row) for row in rows.tolist()]
        # The token after the last computed one.
        positions = [plan.num_computed_tokens[i] + plan.num_scheduled_tokens[i] for i in sampled.tolist()]
        token_ids_R = self._sampler.sample(logits_RV, requests, positions)
        self._batch.append_tokens(rows, token_ids_R)
        for row, (request, token_id) in enumerate(zip(requests, token_ids_R.tolist(), strict=True)):
            result.sampled[request.request_id] = (token_id,)
            if request.finish_reason is not None:
                result.finished[request.request_id] = request.finish_reason
            if request.sampling.logprobs is not None:
                found = self._sampler.logprobs(logits_RV[row], token_id, request.sampling)
                result.logprobs[request.request_id] = (found,)

    def _find_prompt_logprobs(self, plan: StepPlan, packed: PackedBatch, hidden_TE: Tensor, result: StepResult) -> None:
        for index, row in enumerate(packed.rows.tolist()):
            request = self._batch.sampling(row)
            if request.sampling.prompt_logprobs is None:
                continue
            first, num_queries = plan.num_computed_tokens[index], plan.num_scheduled_tokens[index]
            # The prompt's last token is followed by the answer.
            num_wanted = min(num_queries, request.num_prompt_tokens - 1 - first)
            if num_wanted > 0:
                next_token_ids = self._batch.token_ids(row, first + 1, first + 1 + num_wanted).tolist()
                start = packed.starts[index]
                hidden_XE = hidden_TE[start : start + num_wanted]
                result.prompt_logprobs[request.request_id] = self._slice_logprobs(hidden_XE, next_token_ids, request)

    def _slice_logprobs(
        self, hidden_XE: Tensor, next_token_ids: list[int], request: RequestSampling
    ) -> list[TokenLogprobs]:
        """Log-probabilities of the tokens that follow these positions, few rows of logits at a time."""
        size = max(1, MAX_LOGITS_BYTES // (4 * self.model.info.vocab_size))
        found: list[TokenLogprobs] = []
        for start in range(0, len(hidden_XE), size):
            logits_XV = self.model.logits(hidden_XE[start : start + size]).cpu().numpy()
            found += self._sampler.prompt_logprobs(logits_XV, next_token_ids[start : start + size], request.sampling)
        return found
