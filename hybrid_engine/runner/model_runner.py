"""Executes plans: one forward over everything a plan lists, then the next token of each request that is due one."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.groups.layout import MemoryLayout, split_memory
from hybrid_engine.groups.spec import Group, MambaSpec
from hybrid_engine.kernels import native
from hybrid_engine.kernels.attention import most_shared_queries
from hybrid_engine.models.base import ForwardBatch, Model
from hybrid_engine.runner.batch import BatchState, PackedBatch
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.runner.graphs import DecodeGraphs, can_be_recorded
from hybrid_engine.runner.programs import DecodePrograms, has_programs
from hybrid_engine.runner.sampler import RequestSampling, Sampler, greedy_tokens
from hybrid_engine.runner.transfers import ByteStore, Transfers
from hybrid_engine.runner.verification import choose_tokens
from hybrid_engine.step_plan import StepPlan, StepResult, TokenLogprobs, TransferPlan
from hybrid_engine.structured import Grammars

MAX_LOGITS_BYTES = 64 << 20
"""Prompt log-probabilities need logits at every token; they are made in slices of at most so many bytes."""


class ModelRunner:
    """A model with its cache memory. Knows the requests that plans have told it of, and nothing of why they run."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[Group],
        memory: MemoryLayout | Sequence[int],
        *,
        device: torch.device | str = "cpu",
        eos_token_ids: Iterable[int] | None = None,
        store: ByteStore | None = None,
        grammars: Grammars | None = None,
        shares_prefixes: bool = True,
    ) -> None:
        """memory: where blocks can lie, as the coordinator has it; or how many usable ones each group has.

        store: what plans' transfers go to and come from; None: no plan has any.
        eos_token_ids: what min_tokens forbids unless a request ignores it; None: the model's own.
        grammars: of the model's tokenizer; None: no request asks for structured outputs.
        shares_prefixes: whether attention reads keys once for all requests that begin with the same blocks. On a CPU
        that changes no bit.
        Raises CapacityError when the cache memory can't be had.
        """
        device = torch.device(device)
        # All at once and before the first request, who would else wait for a compiler.
        is_native = device.type == "cpu" and all(native.prepare().values())
        self.model = model
        layout = memory if isinstance(memory, MemoryLayout) else split_memory(groups, memory)
        self.cache = CacheTensors(layout, dtype=model.dtype, device=device)
        self._transfers = Transfers(self.cache, store) if store is not None else None
        num_layers = len(model.info.cached_layers)
        assert len(self.cache.layers) == num_layers, f"groups hold {len(self.cache.layers)} of {num_layers} layers"
        group_of = {layer: group_id for group_id, group in enumerate(groups) for layer in group.layer_indices}
        self._group_of_layer = [group_of[layer] for layer in range(num_layers)]
        self._sampler = Sampler(
            model.info.vocab_size,
            eos_token_ids=model.info.eos_token_ids if eos_token_ids is None else eos_token_ids,
            grammars=grammars,
        )
        self._batch = BatchState(
            layout,
            vocab_size=model.info.vocab_size,
            device=device,
            exact=model.is_exact,
            most_shared_queries=[
                _most_shared_queries(model, group, device) if shares_prefixes else 0 for group in groups
            ],
        )
        self._graphs: DecodeGraphs | None = None
        if device.type == "cuda" and can_be_recorded(model):
            self._graphs = DecodeGraphs(self._batch, lambda packed: model.logits(self._forward(packed)))
        self._programs: DecodePrograms | None = None
        if is_native and has_programs(model):
            self._programs = DecodePrograms(model, self._batch, self._forward_batch)
        self.num_steps_total = 0
        """Steps that computed anything."""
        self.num_computed_tokens_total = 0
        """Tokens computed, those computed again after a preemption counted again."""
        self.num_spared_keys_total = 0
        """Reads of a key, in one layer of its group, that weren't needed because requests shared their prefix."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute all that the plan lists and sample where it says so."""
        start = time.perf_counter()
        with self._on_device():
            result = self._execute(plan)
        return replace(result, seconds=time.perf_counter() - start)

    def _on_device(self) -> AbstractContextManager[object]:
        """Make the device the one that kernels are launched on: Triton takes the current one."""
        return torch.cuda.device(self._batch.device) if self._batch.device.type == "cuda" else nullcontext()

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        self._batch.apply(plan, self._sampler.prepare)
        if plan.transfers is None:
            self.cache.copy_blocks(plan.block_copies)
        else:
            self._transfer(plan, plan.transfers)
        result = StepResult(plan.step_id, {})
        if not plan.request_ids:
            return result
        self.num_steps_total += 1
        self.num_computed_tokens_total += sum(plan.num_scheduled_tokens)
        if self._graphs is not None and self._graphs.covers(plan):
            decoded = self._graphs.run(plan)
            self.num_spared_keys_total += decoded.packed.num_spared_keys
            self._sample(plan, decoded.packed, decoded.logits_RV, decoded.token_ids_R, result)
            return result
        if self._programs is not None and self._programs.covers(plan):
            packed, hidden_TE = self._programs.run(plan)
        else:
            packed = self._batch.pack(plan)
            hidden_TE = self._forward(packed)
        self.num_spared_keys_total += packed.num_spared_keys
        self._find_prompt_logprobs(plan, packed, hidden_TE, result)
        if any(plan.is_sampled):
            self._sample(plan, packed, self._wanted_logits(plan, packed, hidden_TE), None, result)
        return result

    def _forward(self, packed: PackedBatch) -> Tensor:
        return self.model(self._forward_batch(packed))

    def _forward_batch(self, packed: PackedBatch) -> ForwardBatch:
        return ForwardBatch(
            token_ids_T=packed.token_ids_T,
            positions_T=packed.positions_T,
            metas=tuple(packed.metas[group_id] for group_id in self._group_of_layer),
            caches=self.cache.layers,
        )

    def _transfer(self, plan: StepPlan, transfers: TransferPlan) -> None:
        assert self._transfers is not None, "a plan transfers bytes, and this runner has no store"
        self._transfers.save(transfers.saves)
        self.cache.copy_blocks(plan.block_copies)
        self.cache.copy_blocks(transfers.copies)
        for load in transfers.loads:
            self._transfers.start(load)

    def _wanted_logits(self, plan: StepPlan, packed: PackedBatch, hidden_TE: Tensor) -> Tensor:
        """Logits behind the last known token of each request that is due one, and behind each of its drafts."""
        sampled = np.flatnonzero(plan.is_sampled)
        num_logits = 1 + packed.num_drafts[sampled]
        ends = np.cumsum(num_logits)
        if ends[-1] < len(hidden_TE):
            shifts = packed.starts[sampled + 1] - ends
            wanted_X = torch.from_numpy(np.arange(ends[-1]) + np.repeat(shifts, num_logits))
            hidden_TE = hidden_TE[wanted_X.to(hidden_TE.device)]
        return self.model.logits(hidden_TE)

    def _sample(
        self, plan: StepPlan, packed: PackedBatch, logits_XV: Tensor, greedy_X: Tensor | None, result: StepResult
    ) -> None:
        """Choose what each request goes on with, drafts verified, and put its states back behind the last accepted.

        greedy_X: greedy_tokens of the logits, if known.
        """
        sampled = np.flatnonzero(plan.is_sampled)
        num_logits = 1 + packed.num_drafts[sampled]
        ends = np.cumsum(num_logits)
        rows = packed.rows[sampled]
        requests = [self._batch.sampling(row) for row in rows.tolist()]
        needs_logits = packed.num_drafts.any() or any([request.needs_logits for request in requests])
        if logits_XV.device.type == "cpu" or needs_logits:
            host_logits_XV = logits_XV.cpu().numpy()
            drafts = [plan.draft_token_ids[i] if plan.draft_token_ids else () for i in sampled.tolist()]
            positions = self._batch.num_tokens(rows).tolist()
            chosen = choose_tokens(self._sampler, host_logits_XV, requests, positions, drafts)
        else:  # few bytes instead of a whole vocabulary for each request
            token_ids_R = (greedy_tokens(logits_XV) if greedy_X is None else greedy_X).cpu()
            assert (token_ids_R >= 0).all(), f"highest logits not finite: {token_ids_R} of {plan.request_ids}"
            chosen = [[token_id] for token_id in token_ids_R.tolist()]
        self._batch.append_tokens(rows, chosen)
        self._roll_back(packed, sampled, np.array([len(token_ids) - 1 for token_ids in chosen]))
        for request, token_ids, start in zip(requests, chosen, (ends - num_logits).tolist(), strict=True):
            result.sampled[request.request_id] = tuple(token_ids)
            if request.finish_reason is not None:
                result.finished[request.request_id] = request.finish_reason
            if request.sampling.logprobs is not None:
                result.logprobs[request.request_id] = tuple(
                    self._sampler.logprobs(logits_V, token_id, request.sampling)
                    for logits_V, token_id in zip(
                        host_logits_XV[start : start + len(token_ids)], token_ids, strict=True
                    )
                )

    def _roll_back(self, packed: PackedBatch, sampled: np.ndarray, num_accepted: np.ndarray) -> None:
        """Where a draft was rejected, the working slot has consumed it: put the state before it there.

        Keys and values need nothing: what follows overwrites those of rejected drafts before anything reads them.
        """
        is_rejected = num_accepted < packed.num_drafts[sampled]
        if not is_rejected.any():
            return
        rejected, num_accepted = sampled[is_rejected], num_accepted[is_rejected]
        for tables in self._batch.tables:
            if isinstance(tables.group.spec, MambaSpec):
                slots = tables.state_slots(packed.rows[rejected], packed.num_drafts[rejected])
                sources = slots[np.arange(len(rejected)), 1 + num_accepted]
                self.cache.copy_states(tables.group.group_id, sources.tolist(), slots[:, 0].tolist())

    def _find_prompt_logprobs(self, plan: StepPlan, packed: PackedBatch, hidden_TE: Tensor, result: StepResult) -> None:
        for index, row in enumerate(packed.rows.tolist()):
            request = self._batch.sampling(row)
            if request.sampling.prompt_logprobs is None:
                continue
            first, num_queries = plan.num_computed_tokens[index], plan.num_scheduled_tokens[index]
            # The token before the first one wanted says how likely that is; the last one is followed by the answer.
            start = max(first, (request.sampling.prompt_logprob_start or 1) - 1)
            end = min(first + num_queries, request.num_prompt_tokens - 1)
            if start < end:
                next_token_ids = self._batch.token_ids(row, start + 1, end + 1).tolist()
                offset = packed.starts[index] - first
                hidden_XE = hidden_TE[offset + start : offset + end]
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


def _most_shared_queries(model: Model, group: Group, device: torch.device) -> int:
    """Queries of a request that can share the reading of keys in all layers of a group; 0: none can."""
    if isinstance(group.spec, MambaSpec):
        return 0
    layers = [model.info.cached_layers[index] for index in group.layer_indices]
    return min(
        most_shared_queries(
            device.type,
            heads_per_kv=layer.num_heads // layer.num_kv_heads,
            head_size=layer.head_size,
            value_size=layer.attended_value_size,
        )
        for layer in layers
    )
