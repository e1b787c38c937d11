"""Executes plans: one forward over everything a plan lists, then the next token of each request that is due one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
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
from hybrid_engine.runner.ahead import UNKNOWN, Begun, NewestTokens, Readback
from hybrid_engine.runner.batch import BatchState, PackedBatch
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.runner.device_draws import choose_on_device, draw_tokens, is_drawn_on_device
from hybrid_engine.runner.graphs import DecodeGraphs, can_be_recorded
from hybrid_engine.runner.programs import DecodePrograms, has_programs
from hybrid_engine.runner.sampler import RequestSampling, Sampler
from hybrid_engine.runner.transfers import ByteStore, Transfers
from hybrid_engine.runner.verification import choose_tokens, keep_accepted
from hybrid_engine.step_plan import StepPlan, StepResult, TokenLogprobs, TransferPlan
from hybrid_engine.structured import Grammars

MAX_ROWS_AHEAD = 1 << 16
"""Requests that may be known when a step begins before the one before is finished."""
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
        self._draws_on_device = device.type != "cpu"
        self._graphs: DecodeGraphs | None = None
        if device.type == "cuda" and can_be_recorded(model):
            self._graphs = DecodeGraphs(self._batch, lambda packed: self.decode_logits(packed))
        model.prepare_highest()
        self._programs: DecodePrograms | None = None
        if is_native and has_programs(model):
            self._programs = DecodePrograms(model, self._batch, self._forward_batch)
        self._newest = NewestTokens(device, num_rows=MAX_ROWS_AHEAD if device.type == "cuda" else 64)
        self._begun: deque[Begun] = deque()
        self._last_end = 0.0
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

    @property
    def can_run_ahead(self) -> bool:
        """Whether steps may begin before those before them are finished, on the thread that finishes them."""
        return self._graphs is not None

    def begin(self, plan: StepPlan) -> Callable[[], StepResult]:
        """Begin a step behind those begun before: what is returned waits for it. To be called in the steps' order.

        A step that needs what only the host can do waits for all steps before it, and is done when this returns.
        """
        start = time.perf_counter()
        with self._on_device(), torch.inference_mode():
            self._take_in(plan)
            begun = self._begin_ahead(plan) if plan.request_ids else None
            result = self._compute(plan) if begun is None else None

        def finish() -> StepResult:
            if begun is None:
                assert result is not None, plan.step_id
                return replace(result, seconds=seconds)
            self._finish_until(begun)
            assert begun.result is not None, plan.step_id
            # What ran beside a step before it is not this step's time.
            first = max(start, self._last_end)
            self._last_end = time.perf_counter()
            return replace(begun.result, seconds=self._last_end - first)

        seconds = time.perf_counter() - start
        return finish

    def wait(self) -> None:
        """Return when all steps begun have run; their results stay to be asked for."""
        if self._batch.device.type == "cuda":
            torch.cuda.synchronize(self._batch.device)

    def _begin_ahead(self, plan: StepPlan) -> Begun | None:
        """Begin a step whose tokens the device chooses; None when it isn't one."""
        if self._graphs is None or not self._graphs.covers(plan):
            return None
        rows = self._batch.rows(plan.request_ids)
        requests = [self._batch.sampling(row) for row in rows.tolist()]
        if not all(map(is_drawn_on_device, requests)) or int(rows.max()) >= self._newest.num_rows:
            return None
        self._count(plan)
        decoded = self._graphs.run(plan)
        positions = self._batch.num_tokens(rows).tolist()
        token_ids_R = draw_tokens(decoded.logits_RV, decoded.token_ids_R, requests, positions)
        self._newest.note(decoded.packed, token_ids_R)
        self._batch.append_tokens(rows, [[UNKNOWN]] * len(rows))
        begun = Begun(plan.step_id, rows, requests, positions, Readback(token_ids_R))
        self._begun.append(begun)
        return begun

    def _finish_until(self, last: Begun | None) -> None:
        """Let the host know the tokens of steps begun, up to one of them; None: of all."""
        while self._begun and (last is None or last.result is None):
            self._begun.popleft().finish(self._batch)

    @torch.inference_mode()
    def _execute(self, plan: StepPlan) -> StepResult:
        self._take_in(plan)
        return self._compute(plan)

    def _take_in(self, plan: StepPlan) -> None:
        """Note what is new, and move blocks."""
        self._batch.apply(plan, self._sampler.prepare)
        if plan.transfers is None:
            self.cache.copy_blocks(plan.block_copies)
        else:
            self._transfer(plan, plan.transfers)

    def _count(self, plan: StepPlan) -> None:
        self.num_steps_total += 1
        self.num_computed_tokens_total += sum(plan.num_scheduled_tokens)

    def _compute(self, plan: StepPlan) -> StepResult:
        result = StepResult(plan.step_id, {})
        if not plan.request_ids:
            return result
        self._finish_until(None)
        self._count(plan)
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
            wanted_XE = self._wanted(plan, packed, hidden_TE)
            highest_X = self._highest(plan, packed, wanted_XE)
            logits_XV = self.model.logits(wanted_XE) if highest_X is None else None
            self._sample(plan, packed, logits_XV, highest_X, result)
        return result

    def decode_logits(self, packed: PackedBatch) -> Tensor:
        """Logits of a step of one token a request, some of which only the device may know."""
        return self.model.logits(self._forward(self._newest.put_in(packed)))

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

    def _wanted(self, plan: StepPlan, packed: PackedBatch, hidden_TE: Tensor) -> Tensor:
        """The rows behind the last known token of each request that is due one, and behind each of its drafts."""
        sampled = np.flatnonzero(plan.is_sampled)
        num_logits = 1 + packed.num_drafts[sampled]
        ends = np.cumsum(num_logits)
        if ends[-1] < len(hidden_TE):
            shifts = packed.starts[sampled + 1] - ends
            wanted_X = torch.from_numpy(np.arange(ends[-1]) + np.repeat(shifts, num_logits))
            hidden_TE = hidden_TE[wanted_X.to(hidden_TE.device)]
        return hidden_TE

    def _highest(self, plan: StepPlan, packed: PackedBatch, wanted_XE: Tensor) -> Tensor | None:
        """Return greedy_tokens of the wanted logits where the model finds them without those, and nobody needs them."""
        requests = [self._batch.sampling(row) for row in packed.rows[np.flatnonzero(plan.is_sampled)].tolist()]
        if not all([request.is_plain_greedy and request.sampling.logprobs is None for request in requests]):
            return None
        return self.model.highest(wanted_XE)

    def _sample(
        self,
        plan: StepPlan,
        packed: PackedBatch,
        logits_XV: Tensor | None,
        greedy_X: Tensor | None,
        result: StepResult,
    ) -> None:
        """Choose what each request goes on with, drafts verified, and put its states back behind the last accepted.

        logits_XV: None: all requests take the highest. greedy_X: greedy_tokens of the logits, if known.
        """
        sampled = np.flatnonzero(plan.is_sampled)
        num_logits = 1 + packed.num_drafts[sampled]
        ends = np.cumsum(num_logits)
        rows = packed.rows[sampled]
        requests = [self._batch.sampling(row) for row in rows.tolist()]
        positions = self._batch.num_tokens(rows).tolist()
        drafts = [plan.draft_token_ids[i] if plan.draft_token_ids else () for i in sampled.tolist()]
        host_logits_XV: np.ndarray | None = None
        places = (ends - num_logits).tolist()
        if logits_XV is None:
            assert greedy_X is not None, plan.request_ids
            assert (greedy_X >= 0).all(), f"places of the highest logits {greedy_X.tolist()} of {plan.request_ids}"
            chosen = keep_accepted(greedy_X.numpy(), drafts)
        elif self._draws_on_device and not packed.num_drafts.any():
            found = choose_on_device(self._sampler, logits_XV, greedy_X, requests, positions)
            chosen, host_logits_XV, places = found.token_ids, found.host_logits_XV, found.places
        else:
            host_logits_XV = logits_XV.cpu().numpy()
            chosen = choose_tokens(self._sampler, host_logits_XV, requests, positions, drafts)
        self._batch.append_tokens(rows, chosen)
        self._roll_back(packed, sampled, np.array([len(token_ids) - 1 for token_ids in chosen]))
        for request, token_ids, start in zip(requests, chosen, places, strict=True):
            result.sampled[request.request_id] = tuple(token_ids)
            if request.finish_reason is not None:
                result.finished[request.request_id] = request.finish_reason
            if request.sampling.logprobs is not None:
                assert host_logits_XV is not None, f"{request.request_id} asks for logprobs"
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
