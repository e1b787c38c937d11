"""Steps launched ahead: the same answers, whatever happens to requests while steps of theirs are in flight."""

import threading

import pytest
import torch
from tiny_engines import TinyEngines
from tiny_models import save_tiny_model

from hybrid_engine import SamplingParams, StructuredOutputsParams
from hybrid_engine.errors import EngineDeadError
from hybrid_engine.invariants import check_invariants
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.speculation.ngram import NgramDrafter
from hybrid_engine.weights import open_checkpoint

SHARED = "a beginning that all of them share, "
PROMPTS = [SHARED + "one", SHARED + "two and two", "abcabcabc", SHARED + "three", "abcone abc"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=16, prompt_logprobs=1),
    "several": SamplingParams(seed=3, max_tokens=12, n=2, logprobs=1, temperature=0.8),
    "stopped": SamplingParams(seed=5, max_tokens=40, stop=("e", "ab"), stop_token_ids=(40, 41, 42)),
    "penalised": SamplingParams(seed=4, max_tokens=16, repetition_penalty=1.2, min_tokens=9),
    "structured": SamplingParams(
        seed=6, max_tokens=30, structured_outputs=StructuredOutputsParams(regex="(abc|one ){2,6}[xy]")
    ),
}
MEMORIES = {"roomy": {}, "preempting": {"num_blocks": 30, "num_states": 12}}
SLOW_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bamba", "mamba2")]


@pytest.fixture(scope="module", params=["gemma3", "jamba", *SLOW_MODELS])
def engines(request, byte_tokenizer, tmp_path_factory) -> TinyEngines:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(request.param, folder, initializer_range=0.08)
    checkpoint = open_checkpoint(folder)
    return TinyEngines(load_model(checkpoint, dtype=torch.float32), checkpoint.config, byte_tokenizer)


def content(output) -> list:
    """Return all that a caller sees of the answers, numbers rounded to what the order of sums leaves alone."""
    prompt = [
        each and {token: round(each[token].logprob, 2) for token in each} for each in output.prompt_logprobs or ()
    ]
    answers = [
        (a.index, a.token_ids, a.text, a.finish_reason, a.stop_reason, [set(each) for each in a.logprobs or ()])
        for a in output.outputs
    ]
    return [prompt, answers]


def contents(llm, prompts, sampling) -> list:
    found = [content(output) for output in llm.generate(prompts, sampling)]
    assert not llm._engine.scheduler.has_unfinished_requests()
    assert llm._engine.scheduler.num_in_flight_steps == 0
    check_invariants(llm._engine.scheduler.coordinator, [])
    return found


CASES = [(depth, num_drafts, memory) for depth in (1, 2) for num_drafts in (0, 2) for memory in MEMORIES]
QUICK = {(1, 0, "preempting"), (1, 2, "roomy")}


@pytest.mark.parametrize(
    ("depth", "num_drafts", "memory"),
    [pytest.param(*case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES],
)
def test_answers_are_those_of_steps_one_by_one(engines, depth, num_drafts, memory):
    drafter = NgramDrafter(min_tokens=1, max_tokens=3) if num_drafts else None
    samplings = list(SAMPLINGS.values())
    expected = contents(engines.make(), PROMPTS, samplings)
    llm = engines.make(
        async_depth=depth, drafter=drafter, draft_slots=num_drafts, max_num_batched_tokens=20, **MEMORIES[memory]
    )
    assert contents(llm, PROMPTS, samplings) == expected
    assert contents(llm, PROMPTS, samplings) == expected  # now with hits


class Gate(ModelRunner):
    """A runner whose steps run when they are let through, and fail when they are told to."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.permits: threading.Semaphore | None = None
        """One for each step that may run; None: all may."""
        self.failure: BaseException | None = None

    def execute(self, plan):
        assert self.permits is None or self.permits.acquire(timeout=30)
        if self.failure is not None:
            raise self.failure
        return super().execute(plan)


@pytest.fixture
def gated(engines):
    return engines.make(async_depth=1, runner_class=Gate)


def test_a_stream_dropped_while_its_next_step_runs_disturbs_nobody(engines, gated):
    sampling = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    expected = contents(engines.make(), PROMPTS[2], sampling)
    permits = gated._engine.runner.permits = threading.Semaphore(1)
    stream = gated.stream(PROMPTS[0], sampling)
    next(stream)
    assert gated._engine.scheduler.num_in_flight_steps == 1
    stream.close()
    permits.release(1000)
    assert contents(gated, PROMPTS[2], sampling) == expected


def test_an_id_used_again_while_a_step_of_the_first_is_in_flight(engines, gated):
    sampling = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=0)
    engine = gated._engine
    engine.add_request("a", [7] * 60, sampling)
    engine.step()
    engine.abort("a")
    engine.add_request("a", [67, 68, 69, 70], sampling)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert sum(len(output.outputs[0].token_ids) for output in outputs) == 4
    assert [list(each) for each in outputs[-1].prompt_logprobs[1:]] == [[68], [69], [70]]


def test_a_step_that_fails_ends_the_engine_with_its_cause_and_its_thread(gated):
    engine = gated._engine
    before = set(threading.enumerate())
    stream = gated.stream(PROMPTS[0], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    next(stream)
    (thread,) = set(threading.enumerate()) - before
    engine.runner.failure = ValueError("the device is gone")
    with pytest.raises(EngineDeadError, match="the device is gone") as caught:
        list(stream)
    assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(EngineDeadError, match="the device is gone"):
        gated.generate("x", progress=False)
    thread.join(timeout=30)
    assert not thread.is_alive()


def test_an_interrupt_that_cuts_a_step_short_leaves_no_thread_behind(gated, monkeypatch):
    engine = gated._engine
    before = set(threading.enumerate())
    engine.add_request("a", [7] * 9, SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
    engine.step()
    (thread,) = set(threading.enumerate()) - before

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._pipeline, "take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    thread.join(timeout=30)
    assert not thread.is_alive()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        engine.step()


def test_a_stop_string_ends_an_answer_whose_next_step_is_in_flight(engines):
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    text = contents(engines.make(), PROMPTS[0], sampling)[0][1][0][2]
    llm = engines.make(async_depth=1)
    (output,) = llm.generate(
        PROMPTS[0], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, stop=(text[5:7],))
    )
    assert output.outputs[0].text == text[: text.index(text[5:7])]
    assert llm._engine.scheduler.num_in_flight_steps == 0


def test_what_is_in_flight_of_an_aborted_request_is_not_taken_for_the_next_one_of_its_id(engines):
    engine = engines.make(async_depth=1, max_num_batched_tokens=8)._engine
    sampling = SamplingParams(prompt_logprobs=0, max_tokens=1, temperature=0)
    engine.add_request("r", [5] * 40, sampling)
    engine.step()
    engine.abort("r")
    engine.add_request("r", [6, 7, 8], sampling)
    outputs = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    assert [output.prompt_token_ids for output in outputs] == [[6, 7, 8]]
    assert [list(position) for position in outputs[0].prompt_logprobs[1:]] == [[7], [8]]
