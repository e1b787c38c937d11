"""A model whose answers show every wrong read, and plans made by hand, without a scheduler."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hybrid_engine.groups.spec import FullAttentionSpec, Group, MambaSpec, SlidingWindowSpec, group_layers
from hybrid_engine.models.base import FULL, SLIDING, ForwardBatch, LayerInfo, Model, ModelInfo
from hybrid_engine.models.layers.rope import Rope
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import BlockCopy, NewBlocks, StartedRequest, StateCapture, StepPlan, StepResult

VOCAB_SIZE, WINDOW, BLOCK_SIZE = 61, 6, 4
GREEDY = SamplingParams(temperature=0)


def place(slots_X: Tensor) -> tuple[Tensor | int, ...]:
    """The index of slots in a cache of one head of one element."""
    return slots_X // BLOCK_SIZE, 0, slots_X % BLOCK_SIZE, 0


class DigestModel(Model):
    """Digests, at each position, the tokens and positions that its layers' caches show there.

    Layer 0 sees everything, layer 1 a window. A wrong block, slot, position or order gives other logits, a slot that
    nobody wrote gives NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dtype = torch.float32
        size = {"num_heads": 1, "num_kv_heads": 1, "head_size": 1, "rope": Rope(1e4, 1)}
        layers = (LayerInfo(0, FULL, **size), LayerInfo(1, SLIDING, **size, window=WINDOW))
        self.info = ModelInfo("digest", layers, VOCAB_SIZE, 2, 4096, (7,), None, 0)
        self.largest_logits_rows = 0

    def check_layers(self) -> None:
        """Nothing to check."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        hidden_TE = torch.empty(len(batch.token_ids_T), 2, dtype=torch.float64)
        for layer in self.info.layers:
            meta, cache = batch.metas[layer.index], batch.caches[layer.index]
            written = place(meta.slots_T)
            cache.k_BKPD[written] = batch.token_ids_T.float()
            cache.v_BKPD[written] = batch.positions_T.float()
            starts = meta.query_starts.tolist()
            for request, num_keys in enumerate(meta.num_keys.tolist()):
                for token in range(starts[request], starts[request + 1]):
                    end = num_keys - (starts[request + 1] - token) + 1
                    seen = range(max(0, end - layer.window) if layer.window else 0, end)
                    table = meta.block_tables_RB[request].tolist()
                    slots = [table[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in seen]
                    read = place(torch.tensor(slots))
                    hidden_TE[token, layer.index] = digest(cache.k_BKPD[read].tolist(), cache.v_BKPD[read].tolist())
        return hidden_TE

    def logits(self, hidden_XE: Tensor) -> Tensor:
        self.largest_logits_rows = max(self.largest_logits_rows, len(hidden_XE))
        mixed_X = hidden_XE[:, 0] + 3 * hidden_XE[:, 1]
        return torch.sin(mixed_X[:, None] * torch.arange(1, VOCAB_SIZE + 1) * 0.1).float() * 3


def digest(token_ids: Sequence[float], positions: Sequence[float]) -> float:
    """A number that depends on every token and position and on their order."""
    value = 0.0
    for token_id, position in zip(token_ids, positions, strict=True):
        value = (value * 31 + token_id * 17 + position + 1) % 1009
    return value


def expected_logits(token_ids: Sequence[int]) -> Tensor:
    """The logits after these tokens, without any cache: float32 [V]."""
    first = max(0, len(token_ids) - WINDOW)
    everything = digest(token_ids, range(len(token_ids)))
    window = digest(token_ids[first:], range(first, len(token_ids)))
    return DigestModel().logits(torch.tensor([[everything, window]], dtype=torch.float64))[0]


def expected_greedy(token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The next tokens of a greedy request."""
    known = list(token_ids)
    for _ in range(num_tokens):
        known.append(int(expected_logits(known).argmax()))
    return known[len(token_ids) :]


class Hand:
    """Makes plans by hand. Blocks come in no order; what nobody may read, the null block included, is poisoned."""

    def __init__(
        self,
        model: Model,
        groups: Sequence[Group],
        *,
        num_blocks: int = 64,
        poison: float = torch.nan,
        device: str = "cpu",
    ) -> None:
        self.groups = groups
        self.runner = ModelRunner(model, groups, [num_blocks] * len(groups), device=device)
        self.poison = poison
        self.free = [list(range(1, num_blocks + 1)) for _ in groups]
        for group_id, blocks in enumerate(self.free):
            random.Random(group_id).shuffle(blocks)
            self.runner.cache.poison(group_id, range(num_blocks + 1), poison)
        self.token_ids: dict[str, list[int]] = {}
        self.num_prompt_tokens: dict[str, int] = {}
        self.num_computed: dict[str, int] = {}
        self.tables: dict[str, list[list[int]]] = {}
        self.new_ids: dict[str, tuple[SamplingParams, int]] = {}
        self.ended_ids: list[str] = []
        self.copies: list[BlockCopy] = []
        self.captures: list[StateCapture] = []
        self.step_id = 0

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        sampling: SamplingParams = GREEDY,
        *,
        seed: int = 0,
        num_prompt_tokens: int | None = None,
        hit: int = 0,
        hit_blocks: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Start a request with the next step; its first `hit` tokens are cached in hit_blocks."""
        self.token_ids[request_id] = list(token_ids)
        self.num_prompt_tokens[request_id] = num_prompt_tokens or len(token_ids)
        self.num_computed[request_id] = hit
        self.tables[request_id] = [list(table) for table in hit_blocks or [()] * len(self.groups)]
        self.new_ids[request_id] = (sampling, seed)

    def end(self, request_id: str) -> None:
        """Take a request's blocks back before the next step."""
        self.ended_ids.append(request_id)
        for group_id, table in enumerate(self.tables.pop(request_id)):
            self._free(group_id, [block for block in table if block])

    def step(self, chunks: Mapping[str, int], drafts: Mapping[str, Sequence[int]] | None = None) -> StepResult:
        """Compute so many next tokens of each request, sampling those that reach their last; drafts come on top."""
        started, new_blocks, drafts = [], [], drafts or {}
        chunks = {request_id: size + len(drafts.get(request_id, ())) for request_id, size in chunks.items()}
        for request_id, size in chunks.items():
            num_drafts = len(drafts.get(request_id, ()))
            new = self._allocate(request_id, self.num_computed[request_id] + size, num_drafts)
            if request_id in self.new_ids:
                started.append(self._start(request_id))
            elif any(new):
                new_blocks.append(NewBlocks(request_id, new))
        plan = StepPlan(
            step_id=self.step_id,
            request_ids=tuple(chunks),
            num_computed_tokens=tuple(self.num_computed[request_id] for request_id in chunks),
            num_scheduled_tokens=tuple(chunks.values()),
            is_sampled=tuple(self.num_computed[r] + size >= len(self.token_ids[r]) for r, size in chunks.items()),
            draft_token_ids=tuple(tuple(drafts.get(request_id, ())) for request_id in chunks) if drafts else (),
            started=tuple(started),
            new_blocks=tuple(new_blocks),
            block_copies=tuple(self.copies),
            state_captures=tuple(self.captures),
            ended_ids=tuple(self.ended_ids),
        )
        self.ended_ids, self.copies, self.captures, self.step_id = [], [], [], self.step_id + 1
        result = self.runner.execute(plan)
        for request_id, size in chunks.items():
            num_rejected = len(drafts.get(request_id, ())) + 1 - len(result.sampled.get(request_id, (0,)))
            self.num_computed[request_id] += size - num_rejected
            self._release_passed(request_id)
        for request_id, token_ids in result.sampled.items():
            self.token_ids[request_id].extend(token_ids)
        return result

    def run(self, num_new_tokens: Mapping[str, int], *, chunk: int = 4096) -> dict[str, list[int]]:
        """Run requests together until each has its new tokens; return those."""
        wanted = {r: len(self.token_ids[r]) + count for r, count in num_new_tokens.items()}
        while chunks := {
            r: min(chunk, len(self.token_ids[r]) - self.num_computed[r])
            for r, count in wanted.items()
            if len(self.token_ids[r]) < count
        }:
            self.step(chunks)
        return {r: self.token_ids[r][-count:] for r, count in num_new_tokens.items()}

    def _start(self, request_id: str) -> StartedRequest:
        sampling, seed = self.new_ids.pop(request_id)
        return StartedRequest(
            request_id=request_id,
            token_ids=tuple(self.token_ids[request_id]),
            num_prompt_tokens=self.num_prompt_tokens[request_id],
            num_computed_tokens=self.num_computed[request_id],
            block_ids=tuple(map(tuple, self.tables[request_id])),
            sampling=sampling,
            seed=seed,
        )

    def _allocate(self, request_id: str, num_slots: int, num_drafts: int) -> tuple[tuple[int, ...], ...]:
        new = []
        for group, free, table in zip(self.groups, self.free, self.tables[request_id], strict=True):
            num_states = 1 + num_drafts if isinstance(group.spec, MambaSpec) else 0
            count = max(0, max(num_states, -(-num_slots // group.block_size)) - len(table))
            new.append(tuple(free.pop() for _ in range(count)))
            table.extend(new[-1])
        return tuple(new)

    def _release_passed(self, request_id: str) -> None:
        """Give window blocks back as the bookkeeping does: the runner is not told."""
        for group_id, group in enumerate(self.groups):
            if window := getattr(group.spec, "window", 0):
                first_needed = max(0, self.num_computed[request_id] - window + 1) // group.block_size
                table = self.tables[request_id][group_id]
                self._free(group_id, [block for block in table[:first_needed] if block])
                table[:first_needed] = [0] * len(table[:first_needed])

    def _free(self, group_id: int, blocks: list[int]) -> None:
        self.runner.cache.poison(group_id, blocks, self.poison)
        self.free[group_id].extend(blocks)


def digest_groups() -> tuple[Group, ...]:
    """The cache groups of DigestModel."""
    size = (1, 1, 4, BLOCK_SIZE)
    return group_layers({0: FullAttentionSpec(*size), 1: SlidingWindowSpec(*size, window=WINDOW)})
