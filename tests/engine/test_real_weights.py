"""The real Gemma 3 270M: whatever way a prompt is computed, the greedy text is the same."""

from pathlib import Path

import pytest
import torch

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.engine import Engine
from hybrid_engine.llm import LLM
from hybrid_engine.models.registry import load_model
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.startup import make_config, plan_engine
from hybrid_engine.tokenizer import load_tokenizer
from hybrid_engine.weights import open_checkpoint

pytestmark = [pytest.mark.real_weights, pytest.mark.timeout(900)]

TEXT = Path(__file__).parent.parent / "data" / "war_and_peace_excerpt.txt"
NUM_PROMPT_TOKENS = 600  # more than the window of 512
SMALL_CHUNKS = [pytest.param(size, marks=pytest.mark.slow) for size in (1, 7)]
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def real_model(real_weights):
    """Return the model in float32 with its tokenizer, loaded once for all engines of this file."""
    checkpoint = open_checkpoint(real_weights)
    return load_model(checkpoint, dtype=torch.float32), load_tokenizer(checkpoint.path), checkpoint.config


@pytest.fixture(scope="module")
def make_llm(real_model):
    model, tokenizer, model_config = real_model

    def make(**settings) -> LLM:
        config = make_config("real", dtype="float32", **{"cache_memory_bytes": "512MiB"} | settings)
        plan = plan_engine(model_config, config)
        coordinator = Coordinator(plan.memory.groups, plan.memory.layout, config=config.cache)
        runner = ModelRunner(model, plan.memory.groups, plan.memory.layout)
        scheduler = Scheduler(config.scheduler, coordinator)
        engine = Engine(scheduler, runner, tokenizer, vocab_size=plan.info.vocab_size, max_model_len=plan.max_model_len)
        return LLM.from_engine(engine, plan)

    return make


@pytest.fixture(scope="module")
def prompt(real_model) -> list[int]:
    _, tokenizer, _ = real_model
    return tokenizer(TEXT.read_text())["input_ids"][:NUM_PROMPT_TOKENS]


@pytest.fixture(scope="module")
def neighbours(real_model) -> list[list[int]]:
    """Return seven other prompts; some share the beginning of the prompt, some nothing."""
    _, tokenizer, _ = real_model
    ids = tokenizer(TEXT.read_text())["input_ids"]
    return [ids[:40] + ids[1000 * k : 1000 * k + 30 * k] for k in range(1, 4)] + [
        ids[500 * k : 500 * k + 100] for k in range(1, 5)
    ]


@pytest.fixture(scope="module")
def cold(make_llm, prompt) -> list[int]:
    (output,) = make_llm(enable_prefix_caching=False).generate([prompt], GREEDY)
    return output.outputs[0].token_ids


@pytest.mark.parametrize("chunk", [*SMALL_CHUNKS, 64, pytest.param(512, marks=pytest.mark.slow)])
def test_any_chunking_gives_the_same_text(make_llm, prompt, cold, chunk):
    (output,) = make_llm(max_num_batched_tokens=chunk).generate([prompt], GREEDY)
    assert output.outputs[0].token_ids == cold


@pytest.mark.parametrize("chunk", [*SMALL_CHUNKS, 64, pytest.param(512, marks=pytest.mark.slow), 2048])
def test_a_hit_gives_the_same_text_and_computes_only_the_rest(make_llm, prompt, cold, chunk):
    llm = make_llm(max_num_batched_tokens=chunk)
    llm.generate([[*prompt[:560], 5, 6, 7]], SamplingParams(max_tokens=2, temperature=0))
    runner = llm._engine.runner
    computed_before = runner.num_computed_tokens_total
    (output,) = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 560
    assert runner.num_computed_tokens_total - computed_before == len(prompt) - 560 + GREEDY.max_tokens - 1
    assert output.outputs[0].token_ids == cold


def test_a_turn_that_goes_on_inside_a_block_gives_the_same_text(make_llm, prompt, cold):
    llm = make_llm()
    llm.generate([prompt[:550]], SamplingParams(max_tokens=1, temperature=0))
    (output,) = llm.generate([prompt], GREEDY)
    assert output.num_cached_tokens == 550
    assert output.outputs[0].token_ids == cold


@pytest.mark.parametrize("is_hit", [False, True], ids=["cold", "hit"])
def test_neighbours_do_not_change_the_text(make_llm, prompt, neighbours, cold, is_hit):
    llm = make_llm(max_num_batched_tokens=512)
    if is_hit:
        llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0))
    outputs = llm.generate([*neighbours[:3], prompt, *neighbours[3:]], GREEDY)
    # Cold, it waits for the 32 tokens that it shares with the first neighbour; else its own last block end is there.
    assert outputs[3].num_cached_tokens == (592 if is_hit else 32)
    assert outputs[3].outputs[0].token_ids == cold


def test_a_forced_preemption_does_not_change_the_text(make_llm, prompt, neighbours, cold):
    llm = make_llm(max_num_batched_tokens=256)
    engine = llm._engine
    engine.add_request("first", neighbours[0], GREEDY)
    engine.add_request("victim", prompt, GREEDY)
    token_ids: list[int] = []
    num_preemptions = 0
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == "victim":
                token_ids += output.outputs[0].token_ids
        running = [request for request in engine.scheduler.running if request.request_id == "victim"]
        # In the middle of the prompt, at its end, and in the answer.
        if running and running[0].num_computed_tokens > (200, 599, 610, 10_000)[num_preemptions]:
            engine.scheduler._preempt(running[0])
            num_preemptions += 1
            if num_preemptions == 2:
                llm.reset_prefix_cache()
    assert (num_preemptions, token_ids) == (3, cold)
