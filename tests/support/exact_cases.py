"""Random cases in which texts are computed in every way that the engine knows, and a record of their bits.

What a model says behind a prefix must be a function of the prefix's tokens alone. So every row that any engine computes
is held against all others of the same prefix: hidden states by the tokens before them, logits by the hidden state.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.connectors.setup import open_connector
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.drafting import Drafter
from hybrid_engine.engine import Engine
from hybrid_engine.groups.layout import split_memory
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.models.base import Model
from hybrid_engine.runner.batch import PackedBatch
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.speculation.ngram import NgramDrafter
from hybrid_engine.startup import EnginePlan, make_config, plan_engine

BUDGETS = (1, 3, 7, 16, 33, 64, 100, 2048)
"""Tokens of a step at most."""
NUM_ROUNDS, NUM_DRAFTS = 3, 3


def digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=12).digest()


def digest_of(row: Tensor) -> bytes:
    return digest(row.contiguous().view(torch.uint8).numpy().tobytes())


@dataclass
class Bits:
    """The bits of each row that was computed first, and how many of those after it had others."""

    known: dict[tuple[str, bytes], bytes] = field(default_factory=dict)
    num_rows: Counter[str] = field(default_factory=Counter)
    """Rows computed …"""
    num_again: Counter[str] = field(default_factory=Counter)
    """… of which others had been computed from the same before …"""
    num_different: Counter[str] = field(default_factory=Counter)
    """… and had other bits."""

    def note(self, kind: str, came_from: bytes, row: Tensor) -> None:
        found = digest_of(row)
        first = self.known.setdefault((kind, came_from), found)
        self.num_rows[kind] += 1
        self.num_again[kind] += first is not found
        self.num_different[kind] += first != found

    @contextmanager
    def of_logits(self, model: Model) -> Iterator[None]:
        """Note the bits of all logits that a model gives meanwhile."""
        logits = model.logits

        def noted(hidden_XE: Tensor) -> Tensor:
            logits_XV = logits(hidden_XE)
            for hidden_E, logits_V in zip(hidden_XE, logits_XV, strict=True):
                self.note("logits", digest_of(hidden_E), logits_V)
            return logits_XV

        model.logits = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            del model.logits


class RecordingRunner(ModelRunner):
    """Notes the bits of every token's hidden state by the tokens up to it."""

    bits: Bits

    def _forward(self, packed: PackedBatch) -> Tensor:
        hidden_TE = super()._forward(packed)
        positions = packed.positions_T.tolist()
        for index, row in enumerate(packed.rows.tolist()):
            token_ids = self._batch._token_ids[row]
            for token in range(packed.starts[index], packed.starts[index + 1]):
                came_from = digest(token_ids[: positions[token] + 1].tobytes())
                self.bits.note("hidden states", came_from, hidden_TE[token])
        return hidden_TE


class Guesser:
    """Guesses what was answered before, often wrongly, sometimes not at all."""

    def __init__(self, answers: Mapping[tuple[int, ...], list[int]], vocab_size: int, rng: random.Random) -> None:
        self.answers, self.vocab_size, self.rng = answers, vocab_size, rng

    def propose(self, requests: Sequence[Any], max_drafts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._guess(request, most) for request, most in zip(requests, max_drafts, strict=True)]

    def _guess(self, request: Any, most: int) -> tuple[int, ...]:
        answer = self.answers.get(tuple(request.token_ids[: request.num_prompt_tokens]), [7, 8, 9, 10, 11])
        right = answer[request.num_output_tokens :][: self.rng.randint(0, most)]
        return tuple(t if self.rng.random() < 0.8 else self.rng.randrange(3, self.vocab_size) for t in right)

    def observe(self, request: Any, num_drafts: int, num_accepted: int) -> None:
        pass


@dataclass
class ExactCases:
    """Makes traffic at random around one loaded model. A case is a request: what came before and beside it is drawn."""

    model: Model
    model_config: Mapping[str, Any]
    tokenizer: Any
    texts: Sequence[Sequence[int]]
    """What prompts begin with."""
    lengths: Sequence[int]
    """Tokens of those beginnings."""
    num_new: int = 6
    budgets: Sequence[int] = BUDGETS
    company: tuple[int, int] = (2, 6)
    """Requests that come at once, at least and at most."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    bits: Bits = field(default_factory=Bits)
    counts: Counter[str] = field(default_factory=Counter)
    """What the cases were like."""
    answers: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    cold: set[tuple[int, ...]] = field(default_factory=set)
    """Texts that were computed alone, at once and from nothing."""

    def run(self, num_cases: int, *, seed: int = 0) -> None:
        """Make engines with settings of their own until there were so many cases, then each text cold and alone."""
        rng = random.Random(seed)
        with self.bits.of_logits(self.model):
            while self.counts["cases"] < num_cases:
                for text in self._play(rng):
                    self._run_cold(text)

    def _play(self, rng: random.Random) -> list[list[int]]:
        """One engine: prompts in company, some again, some with more behind their answers. Returns all texts."""
        draft_slots = rng.choice([0, NUM_DRAFTS])
        engine = self._make_engine(rng, draft_slots)
        self.counts["engines"] += 1
        prompts = [self._draw_prompt(rng) for _ in range(rng.randint(*self.company))]
        texts: list[list[int]] = []
        for number in range(NUM_ROUNDS):
            company = [prompt for prompt in prompts if number == 0 or rng.random() < 0.6]
            texts += self._run_together(engine, rng, company, number)
            if texts and rng.random() < 0.5:
                prompts.append([*texts[rng.randrange(len(texts))][: max(self.lengths)], 5, 6])  # a next turn
        self.counts["drafts computed"] += engine.scheduler.drafting.num_drafts
        self.counts["drafts accepted"] += engine.scheduler.drafting.num_accepted
        return texts

    def _draw_prompt(self, rng: random.Random) -> list[int]:
        tail = rng.choice([[], [], [9], [11, 12, 13], list(range(20, 41))])
        return [*rng.choice(self.texts)[: rng.choice(self.lengths)], *tail]

    def _make_engine(self, rng: random.Random, draft_slots: int) -> Engine:
        budget = rng.choice(self.budgets)
        settings: dict[str, Any] = {
            "max_num_batched_tokens": budget,
            "max_num_seqs": min(rng.choice([1, 2, 8]), budget),
            "block_size": rng.choice([4, 16]),
            "async_depth": rng.choice([0, 0, 1]),
            "host_cache_bytes": "32MiB" if rng.random() < 0.3 else None,
        }
        return self._put_together(settings, rng, draft_slots=draft_slots, scarcity=rng.choice([None, 1.1, 1.4, 2.0]))

    def _put_together(
        self,
        settings: Mapping[str, Any],
        rng: random.Random | None = None,
        *,
        draft_slots: int = 0,
        scarcity: float | None = None,
    ) -> Engine:
        """scarcity: memory for so many of the longest requests; None: ample."""
        dtype = str(self.model.dtype).removeprefix("torch.")
        config = make_config(
            "random", **{"dtype": dtype, "exact": self.model.is_exact} | dict(self.settings) | dict(settings)
        )
        config = replace(config, scheduler=replace(config.scheduler, draft_slots=draft_slots))
        plan = plan_engine(self.model_config, config)
        groups, layout = plan.memory.groups, plan.memory.layout
        if scarcity is not None:
            layout = split_memory(groups, self._few_blocks(plan, scarcity, 2 + draft_slots))
        coordinator = Coordinator(groups, layout, config=config.cache)
        connector = open_connector(config.cache, coordinator, model=self.model, model_config=self.model_config)
        runner = RecordingRunner(self.model, groups, layout, store=connector.store if connector else None)
        runner.bits = self.bits
        return Engine(
            Scheduler(config.scheduler, coordinator, connector=connector, drafter=self._draw_drafter(rng, plan)),
            runner,
            self.tokenizer,
            vocab_size=plan.info.vocab_size,
            max_model_len=plan.max_model_len,
            tiers=connector,
        )

    def _draw_drafter(self, rng: random.Random | None, plan: EnginePlan) -> Drafter | None:
        """Return one that guesses by what was answered before, or by what stands in the prompt."""
        if rng is None:
            return None
        guesser = Guesser(self.answers, plan.info.vocab_size, rng)
        return rng.choice([guesser, NgramDrafter(min_tokens=1, max_tokens=3)])

    def _few_blocks(self, plan: EnginePlan, num_requests: float, num_states: int) -> list[int]:
        longest = max(self.lengths) + 2 * self.num_new + 30
        needed = [
            num_states if group.block_size == ENDLESS else 2 + -(-longest // group.block_size)
            for group in plan.memory.groups
        ]
        return [int(num_requests * count) for count in needed]

    def _run_together(
        self, engine: Engine, rng: random.Random, prompts: list[list[int]], number: int
    ) -> list[list[int]]:
        texts: dict[str, list[int]] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{number} {index}"
            engine.add_request(request_id, prompt, self._draw_sampling(rng))
            texts[request_id] = list(prompt)
        num_preempted = 0
        while engine.has_unfinished_requests():
            for output in engine.step():
                texts[output.request_id] += output.outputs[0].token_ids
                if output.finished:
                    self._count(output)
            running = engine.scheduler.running
            if running and num_preempted < 3 and rng.random() < 0.1 and engine.scheduler.num_in_flight_steps == 0:
                engine.scheduler._preempt(rng.choice(running))
                num_preempted += 1
        for prompt, text in zip(prompts, texts.values(), strict=True):
            self.answers[tuple(prompt)] = text[len(prompt) :]
        return list(texts.values())

    def _draw_sampling(self, rng: random.Random) -> SamplingParams:
        wants_logprobs = rng.random() < 0.05
        self.counts["with prompt_logprobs"] += wants_logprobs
        logprobs = 0 if wants_logprobs else None
        return SamplingParams(max_tokens=self.num_new, temperature=0, ignore_eos=True, prompt_logprobs=logprobs)

    def _count(self, output: Any) -> None:
        self.counts["cases"] += 1
        self.counts["with a hit"] += output.cache.hit > 0
        self.counts["tokens hit"] += output.cache.hit
        self.counts["tokens from the host tier"] += output.cache.external
        self.counts["preemptions"] += output.metrics.num_preemptions

    def _run_cold(self, text: list[int]) -> None:
        if tuple(text) in self.cold:
            return
        self.cold.add(tuple(text))
        engine = self._put_together({"enable_prefix_caching": False, "max_num_batched_tokens": 4096})
        engine.add_request("cold", text, SamplingParams(max_tokens=1, temperature=0))
        while engine.has_unfinished_requests():
            engine.step()
