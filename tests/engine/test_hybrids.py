"""Every kind of hybrid through the whole engine: cold and with hits, in chunks, side by side, with memory or without.

Freed memory is NaN throughout. Somebody else's forward of whole texts says what is right; the runner counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import tiny_hybrids
import torch
from tiny_hybrids import TinyHybrid
from watched_runner import WatchedRunner

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.engine import Engine
from hybrid_engine.groups.layout import split_memory
from hybrid_engine.invariants import check_invariants
from hybrid_engine.llm import LLM
from hybrid_engine.models.base import Model
from hybrid_engine.models.registry import load_model
from hybrid_engine.plan import plan_memory
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.startup import EngineConfig, EnginePlan, make_config, plan_engine
from hybrid_engine.weights import open_checkpoint

NUM_NEW = 8
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
NUM_PROMPT, NUM_SHARED = 79, 45
"""The answer fills the prompt's last block and goes on in another one; what is shared ends inside a block."""
TEXT = "{}. Each user has a text of his own; it has several sentences, and some numbers: {}"
MARGIN = 2e-4
"""By how much every right token leads: sums in another order move logits by less."""
AMPLE, WHOLE, MAX_USERS = 300, 2048, 8
CHUNKS = [1, 3, 7, 64, WHOLE]


@dataclass(frozen=True)
class Stage:
    """A prompt and the answer of each user, and the hit that ample memory gives."""

    name: str
    prompts: list[list[int]]
    answers: list[list[int]]
    hit: int


@dataclass(frozen=True)
class Subject:
    """A model, and what its users say one after the other."""

    tiny: TinyHybrid
    model: Model
    tokenizer: Any
    stages: list[Stage]

    def make_llm(self, num_blocks: Mapping[int, int] | None = None, **settings: Any) -> LLM:
        """Put an engine together as `start_engine` does, but with so many blocks in some groups."""
        common = {"max_model_len": 200, "cache_memory_bytes": "64MiB", "block_sizes": self.tiny.block_sizes}
        config = make_config(self.tiny.folder, **common | settings)
        plan = plan_engine(open_checkpoint(self.tiny.folder).config, config)
        groups = plan.memory.groups
        layout = split_memory(groups, [(num_blocks or {}).get(group.group_id, AMPLE) for group in groups])
        return self.put_together(config, replace(plan, memory=replace(plan.memory, layout=layout)))

    def make_sharing_llm(self, num_requests: float, **settings: Any) -> LLM:
        """Put an engine together as `start_engine` does: all groups share memory for so many requests at once."""
        common = {"max_model_len": 200, "cache_memory_bytes": "64MiB", "block_sizes": self.tiny.block_sizes}
        config = make_config(self.tiny.folder, **common | settings)
        plan = plan_engine(open_checkpoint(self.tiny.folder).config, config)
        memory_bytes = int(num_requests * sum(plan.memory.request_bytes(200, chunk_tokens=64, num_states=2).values()))
        return self.put_together(config, replace(plan, memory=plan_memory(plan.memory.groups, memory_bytes)))

    def put_together(self, config: EngineConfig, plan: EnginePlan) -> LLM:
        groups, layout = plan.memory.groups, plan.memory.layout
        scheduler = Scheduler(config.scheduler, Coordinator(groups, layout, config=config.cache))
        runner = WatchedRunner(ModelRunner(self.model, groups, layout), scheduler)
        engine = Engine(scheduler, runner, self.tokenizer, vocab_size=259, max_model_len=200)
        return LLM.from_engine(engine, plan)

    def answer(self, prompts: list[list[int]]) -> list[list[int]]:
        """What greedy decoding gives: found cold, then proved by the other forward."""
        answers = answers_of(self.make_llm(enable_prefix_caching=False).generate(prompts, GREEDY))
        self.tiny.check_greedy(prompts, answers, margin=MARGIN)
        return answers


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.slow if name in tiny_hybrids.LIKE_OTHERS else ())
        for name in tiny_hybrids.NAMES
    ],
)
def subject(request, byte_tokenizer, ids, tmp_path_factory) -> Subject:
    tiny = tiny_hybrids.make(request.param, tmp_path_factory.mktemp("hybrid"))
    model = load_model(open_checkpoint(tiny.folder), dtype=torch.float32)
    made = Subject(tiny, model, byte_tokenizer, [])
    first = [ids(TEXT.format(user, 7919**3 * (user + 3)))[:NUM_PROMPT] for user in range(MAX_USERS)]
    replies = made.answer(first)
    beginnings = [prompt[:NUM_SHARED] for prompt in first]
    histories = [prompt + reply for prompt, reply in zip(first, replies, strict=True)]
    edited = [history[: NUM_PROMPT + 4] for history in histories]
    # Only what keeps all tokens tells that two prompts part inside what was computed, where no state was left.
    parting = 32 if any(layer.kind == "full_attention" for layer in model.info.layers) else 0
    end = NUM_PROMPT + NUM_NEW - 1
    made.stages[:] = [Stage("cold", first, replies, 0), Stage("identical", first, replies, 64)] + [
        Stage(name, prompts := [text + ids(more) for text in texts], made.answer(prompts), hit)
        for name, texts, more, hit in (
            ("shared prefix", beginnings, " then another end", 0),
            ("shared prefix again", beginnings, " and once more another", parting),
            ("edited tail", edited, " (edited)", NUM_PROMPT),
            ("next turn", histories, " go on?", end),
            ("earlier turn", histories, " or rather?", end),
        )
    ]
    return made


def answers_of(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def chunked(chunk: int, num_users: int) -> dict[str, int]:
    """Settings by which a prompt is computed so many tokens at a time."""
    return {"max_num_batched_tokens" if num_users == 1 else "long_prefill_token_threshold": chunk}


def play(llm: LLM, stages: list[Stage], num_users: int) -> WatchedRunner:
    """Let users say what they have to say; what is right and what is claimed is checked."""
    runner = llm._engine.runner
    for stage in stages:
        outputs = llm.generate(stage.prompts[:num_users], GREEDY)
        assert answers_of(outputs) == stage.answers[:num_users], stage.name
        for output in outputs:
            request_id, num_prompt = output.request_id, len(output.prompt_token_ids)
            assert runner.hits[request_id] == output.num_cached_tokens == output.cache.hit
            if runner.num_starts[request_id] == 1:
                assert runner.num_computed[request_id] == num_prompt - output.num_cached_tokens + NUM_NEW - 1
        check_invariants(runner.scheduler.coordinator, [])
    return runner


def play_with_ample_memory(subject: Subject, chunk: int, num_users: int) -> list[int]:
    """Everybody hits what can be hit, nobody waits. Returns by group the blocks that this takes at most.

    Where several run at once, those that the first prompts take: only then is it known that nothing will be found.
    """
    llm = subject.make_llm(**chunked(chunk, num_users))
    first_peaks = list(play(llm, subject.stages[:1], num_users).peaks)
    runner = play(llm, subject.stages[1:], num_users)
    expected = [stage.hit for stage in subject.stages for _ in range(num_users)]
    assert list(runner.hits.values()) == expected
    assert (runner.num_preemptions, runner.most_waiting) == (0, 0)
    return first_peaks if num_users > 1 else runner.peaks


def play_everywhere(subject: Subject, chunk: int, num_users: int) -> None:
    """With ample memory, and then with one block too few for all at once in a group."""
    peaks = play_with_ample_memory(subject, chunk, num_users)
    # Small chunks take long: of the groups, one for each number of users.
    for group_id in range(len(peaks)) if chunk >= 7 else [num_users % len(peaks)]:
        # One alone has all that it needs, and nothing beside it.
        num_blocks = peaks[group_id] - 1 if num_users > 1 else peaks[group_id]
        llm = subject.make_llm({group_id: num_blocks}, **chunked(chunk, num_users))
        runner = play(llm, subject.stages, num_users)
        has_waited = runner.num_preemptions + runner.most_waiting > 0
        assert has_waited if num_users > 1 else runner.least_free[group_id] == 0


def test_hits_change_no_answer_and_skip_what_they_claim(subject):
    play_everywhere(subject, chunk=64, num_users=3)


@pytest.mark.parametrize("subject", ["jamba", "nemotron_h"], indirect=True)
def test_blocks_in_use_are_moved_to_where_memory_is_left_and_no_answer_changes(subject):
    runner = play(subject.make_sharing_llm(1.2), subject.stages, num_users=3)
    assert runner.most_waiting > 0
    assert sum(arena.num_moved for arena in runner.scheduler.coordinator.memory.arenas) > 0


@pytest.mark.slow
@pytest.mark.parametrize("num_requests", [1.4, 2.5])
def test_hits_change_no_answer_while_memory_flows_between_groups(subject, num_requests):
    llm = subject.make_sharing_llm(num_requests)
    # Enough for the longest alone: an answer would else end where the memory does.
    assert llm.memory_plan.capacity_tokens >= max(map(len, subject.stages[-1].prompts)) + NUM_NEW
    play(llm, subject.stages, num_users=3)


@pytest.mark.slow
@pytest.mark.parametrize("num_users", [1, 3, 8])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_hits_change_no_answer_in_any_chunks_with_any_company(subject, chunk, num_users):
    play_everywhere(subject, chunk, num_users)


def test_prompts_share_the_budget_of_a_step(subject):
    runner = play(subject.make_llm(max_num_batched_tokens=16), subject.stages, num_users=3)
    assert runner.most_tokens == 16


def test_prompts_of_different_lengths_run_side_by_side(subject, ids):
    prompts = [ids(TEXT.format(user, 1777 * user))[:length] for user, length in enumerate((20, 64, 81))]
    answers = answers_of(subject.make_llm(max_num_batched_tokens=40).generate(prompts, GREEDY))
    subject.tiny.check_greedy(prompts, answers, margin=MARGIN)


def test_questions_on_one_document_compute_it_once(subject, ids):
    stem = "A long text that several questions are about, with some numbers: 12, 57, 33, 61 and 90. Question "
    questions = [ids(f"{stem}{i}: which?") for i in range(8)]
    outputs = subject.make_llm().generate(questions, GREEDY)
    shared = len(stem) // 32 * 32
    assert len(stem) - shared < 16  # so that it is the same with blocks of 16
    assert [output.num_cached_tokens for output in outputs] == [0] + [shared] * 7
    subject.tiny.check_greedy(questions, answers_of(outputs))
