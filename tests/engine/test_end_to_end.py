"""From text to text: a tiny random Gemma 3 against transformers, and the real one."""

import pytest
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from hybrid_engine.demo.run import Demo
from hybrid_engine.errors import PromptTooLongError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

LOGPROB_TOLERANCE = 1e-4  # float32, two orders of summation
NUM_NEW = 16
GREEDY = SamplingParams(max_tokens=NUM_NEW, temperature=0, ignore_eos=True)
# Shorter and longer than the window of 8, of one block of 16 exactly and one more.
PROMPTS = ["a", "sixteen letters.", "seventeen letters", "a prompt that is much longer than the window is, by far"]


@pytest.fixture(scope="module")
def oracle(tiny_gemma3):
    return AutoModelForCausalLM.from_pretrained(tiny_gemma3).eval()


@pytest.fixture
def llm(tiny_gemma3, device):
    return LLM(tiny_gemma3, device=device, cache_memory_bytes="2MiB", num_threads=1)


def expected(oracle, token_ids):
    with torch.no_grad():
        tokens = oracle.generate(
            torch.tensor([token_ids]),
            max_new_tokens=NUM_NEW,
            min_new_tokens=NUM_NEW,
            do_sample=False,
            eos_token_id=None,
        )
    return tokens[0, len(token_ids) :].tolist()


def all_logprobs(oracle, token_ids):
    with torch.no_grad():
        return oracle(torch.tensor([token_ids])).logits[0].log_softmax(-1)


def tokens(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_answers_are_those_of_transformers(llm, oracle, ids):
    assert tokens(llm.generate(PROMPTS, GREEDY)) == [expected(oracle, ids(prompt)) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 7},
        {"long_prefill_token_threshold": 5},
        {"max_num_seqs": 1},
        {"block_size": 4},
        {"enable_prefix_caching": False},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_how_steps_are_filled_changes_no_answer(tiny_gemma3, llm, settings, device):
    other = LLM(tiny_gemma3, device=device, **{"cache_memory_bytes": "2MiB"} | settings)
    assert tokens(other.generate(PROMPTS, GREEDY)) == tokens(llm.generate(PROMPTS, GREEDY))


def test_a_preemption_changes_no_answer(tiny_gemma3, llm, device):
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    short_of_memory = LLM(
        tiny_gemma3, device=device, cache_memory_bytes=120_000, max_model_len=80, max_num_batched_tokens=16
    )
    outputs = short_of_memory.generate(PROMPTS[:3], long)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert tokens(outputs) == tokens(llm.generate(PROMPTS[:3], long))


def test_a_hit_changes_no_answer(llm):
    cold, warm = llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY)
    assert [output.num_cached_tokens for output in cold] == [0, 0, 0, 0]
    assert [output.num_cached_tokens for output in warm] == [0, 0, 16, 48]
    assert tokens(cold) == tokens(warm)


def test_each_prompts_explanation_adds_up(llm):
    for output in llm.generate(PROMPTS, GREEDY) + llm.generate(PROMPTS, GREEDY):
        assert output.cache.hit + output.cache.LAST + sum(output.cache.reasons().values()) == len(output.prompt)


def test_a_turn_that_extends_prompt_and_answer_hits_both(llm):
    (first,) = llm.generate(PROMPTS[3], GREEDY)
    history = first.prompt_token_ids + first.outputs[0].token_ids
    (second,) = llm.generate([[*history, 100, 101]], GREEDY)
    # All but the answer's last token, which was sampled and never computed.
    assert second.num_cached_tokens == len(history) - 1


def test_logprobs_are_those_of_transformers(llm, oracle, ids):
    (output,) = llm.generate("a question", SamplingParams(max_tokens=4, temperature=0, logprobs=3, ignore_eos=True))
    completion = output.outputs[0]
    rows = all_logprobs(oracle, ids("a question") + completion.token_ids)[9:]
    for row, token_id, position in zip(rows, completion.token_ids, completion.logprobs, strict=False):
        assert position[token_id].logprob == pytest.approx(row[token_id].item(), abs=LOGPROB_TOLERANCE)
        assert set(position) == set(row.topk(3).indices.tolist())


@pytest.mark.parametrize("is_cached", [False, True], ids=["cold", "cached"])
@pytest.mark.parametrize("budget", [7, 2048], ids=["in chunks", "whole"])
def test_prompt_logprobs_are_those_of_transformers(tiny_gemma3, oracle, ids, is_cached, budget, device):
    llm = LLM(tiny_gemma3, device=device, cache_memory_bytes="2MiB", max_num_batched_tokens=budget)
    if is_cached:
        llm.generate(PROMPTS[3], GREEDY)
    (output,) = llm.generate(PROMPTS[3], SamplingParams(max_tokens=1, prompt_logprobs=0))
    prompt = ids(PROMPTS[3])
    rows = all_logprobs(oracle, prompt)
    found = [
        position[token_id].logprob for position, token_id in zip(output.prompt_logprobs[1:], prompt[1:], strict=True)
    ]
    wanted = [row[token_id].item() for row, token_id in zip(rows, prompt[1:], strict=False)]
    assert found == pytest.approx(wanted, abs=LOGPROB_TOLERANCE)


def test_the_same_seed_gives_the_same_answer_alone_and_among_others(llm):
    seeded = SamplingParams(max_tokens=NUM_NEW, seed=5, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[3], seeded)
    among = llm.generate([PROMPTS[0], PROMPTS[3], PROMPTS[2]], [GREEDY, seeded, GREEDY])[1]
    assert alone.outputs[0].token_ids == among.outputs[0].token_ids


def test_n_answers_differ_and_the_first_is_the_one_without_siblings(llm):
    def ask(n):
        return llm.generate(PROMPTS[3], SamplingParams(n=n, max_tokens=NUM_NEW, seed=5, ignore_eos=True))[0].outputs

    three = [completion.token_ids for completion in ask(3)]
    assert len(set(map(tuple, three))) == 3
    assert three[0] == ask(1)[0].token_ids


def test_two_models_live_in_one_process(tiny_gemma3, llm, device):
    other = LLM(tiny_gemma3, device=device, dtype="bfloat16", cache_memory_bytes="1MiB")
    first, second = llm.stream(PROMPTS[3], GREEDY), other.stream(PROMPTS[3], GREEDY)
    interleaved = [[a.outputs[0].token_ids[0], b.outputs[0].token_ids[0]] for a, b in zip(first, second, strict=True)]
    assert [row[0] for row in interleaved] == tokens(llm.generate(PROMPTS[3], GREEDY))[0]
    assert [row[1] for row in interleaved] == tokens(other.generate(PROMPTS[3], GREEDY))[0]


def test_an_answer_goes_as_far_as_the_model_reaches(llm):
    (output,) = llm.generate(PROMPTS[3], SamplingParams(max_tokens=None, temperature=0, ignore_eos=True))
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256
    assert output.outputs[0].finish_reason == "length"


def test_a_prompt_longer_than_the_memory_holds_is_refused_with_the_limit(tiny_gemma3, device):
    llm = LLM(tiny_gemma3, device=device, cache_memory_bytes=100_000)
    with pytest.raises(PromptTooLongError, match=f"max_model_len is {llm.max_model_len}"):
        llm.generate([[5] * (llm.max_model_len + 1)])


@pytest.fixture(scope="module")
def real_llm(real_weights):
    return LLM(real_weights, cache_memory_bytes="512MiB")


@pytest.mark.real_weights
def test_the_real_model_goes_on_with_a_list_of_capitals(real_llm):
    sampling = SamplingParams(max_tokens=1, temperature=0)
    (output,) = real_llm.generate("France: Paris. Germany: Berlin. Italy:", sampling)
    assert output.outputs[0].text == " Rome"
    # Begin of text, once.
    assert [index for index, token_id in enumerate(output.prompt_token_ids) if token_id == 2] == [0]


@pytest.mark.real_weights
def test_the_demo_answers_from_its_handbook_and_hits(real_llm):
    demo = Demo(real_llm, Console(quiet=True))
    demo.run()
    answers = [request.with_cache.outputs[0].text for request in demo.answered]
    assert "Marigold" in answers[0]
    assert "Gannet Rock" in answers[1]
    assert demo.on.computed_tokens < demo.off.computed_tokens / 4
    assert all(request.without_cache.num_cached_tokens == 0 for request in demo.answered)
