"""The trained hybrid that comes along: right answers, the same however they come about, and the same as transformers'.

A wrong recurrent state shows here as a wrong answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, JambaForCausalLM

from hybrid_engine import tiny_hybrid
from hybrid_engine.config import SpeculativeConfig
from hybrid_engine.engine import Engine
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams
from training.tiny_hybrid import export, tasks
from training.tiny_hybrid.evaluate import Sample, end_of, needle_sample, recall_sample, start_of
from training.tiny_hybrid.tokenizer import load

FOLDER = Path(tiny_hybrid.__file__).parent
ANSWER = SamplingParams(max_tokens=16, temperature=0)
LONG = SamplingParams(max_tokens=128, temperature=0, ignore_eos=True)
DEPTHS = (0.1, 0.5, 0.9)


def make_llm(**settings: object) -> LLM:
    return LLM(**{"cache_memory_bytes": "256MiB"} | settings)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return make_llm()


def ids(llm: LLM, text: str) -> list[int]:
    """A sample's tokens: it begins with the token that begins a text."""
    return llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]


def answers(llm: LLM, samples: Iterable[Sample]) -> list[str]:
    outputs = llm.generate([ids(llm, sample.prompt) for sample in samples], ANSWER, progress=False)
    return [output.outputs[0].text for output in outputs]


def num_right(samples: list[Sample], texts: list[str]) -> int:
    return sum(sample.answer == text for sample, text in zip(samples, texts, strict=True))


def needles(depth: float, count: int, num_tokens: int) -> list[Sample]:
    return [needle_sample(random.Random(f"needle {depth} {number}"), depth, num_tokens) for number in range(count)]


def test_it_is_the_model_where_none_is_named(llm: LLM) -> None:
    assert llm.model_info == LLM.plan(tiny_hybrid.NAME).info == LLM.plan(FOLDER).info


def test_it_is_found_by_its_name_as_a_draft_model_too(llm):
    drafting = make_llm(speculative=SpeculativeConfig("draft_model", model=tiny_hybrid.NAME))
    (drafted,), (plain,) = drafting.generate("The king", ANSWER), llm.generate("The king", ANSWER)
    assert drafted.metrics.num_accepted_tokens > 0
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert llm.engine_plan.dtype == torch.float32
    assert {layer.kind for layer in llm.model_info.layers} == {"mamba", "full_attention"}


def test_it_is_small_and_what_the_training_exports() -> None:
    assert (FOLDER / export.WEIGHTS).stat().st_size <= 12_000_000
    assert export.load(FOLDER).settings == export.ModelSettings()
    assert (FOLDER / "tokenizer.json").read_text() == load().to_str(pretty=True)


def test_a_conversation_is_answered_and_the_next_turn_goes_on_at_its_end(llm: LLM) -> None:
    messages = [
        {"role": "system", "content": " The code of Belora is 4071. The ship of Moki is grifen."},
        {"role": "user", "content": "What is the ship of Moki?"},
    ]
    (first,) = llm.chat(messages, ANSWER)
    assert (first.outputs[0].text, first.outputs[0].finish_reason) == (" grifen.", "stop")
    messages.append({"role": "assistant", "content": first.outputs[0].text})
    messages.append({"role": "user", "content": "What is the code of Belora?"})
    (second,) = llm.chat(messages, ANSWER)
    assert second.outputs[0].text == " 4071."
    assert second.num_cached_tokens >= len(first.prompt_token_ids) + len(first.outputs[0].token_ids) - 1


PROMPTS = {"English": "The prince looked at her", "recall": recall_sample(random.Random(1), 128, load()).prompt}


@pytest.mark.parametrize("prompt", PROMPTS.values(), ids=PROMPTS)
def test_128_greedy_tokens_are_those_of_transformers(llm: LLM, prompt: str) -> None:
    token_ids = AutoTokenizer.from_pretrained(FOLDER)(prompt, add_special_tokens=False)["input_ids"]
    (output,) = llm.generate([token_ids], LONG)
    assert output.outputs[0].token_ids == transformers_greedy(token_ids, 128)


@torch.inference_mode()
def transformers_greedy(token_ids: list[int], count: int) -> list[int]:
    """One forward of the prompt, then single tokens: their cache is right for these."""
    model = JambaForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    out, tokens = model(torch.tensor([token_ids]), use_cache=True), []
    while len(tokens) < count:
        tokens.append(int(out.logits[0, -1].argmax()))
        out = model(torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
    return tokens


def test_eight_questions_on_one_document_compute_it_once() -> None:
    llm, rng = make_llm(), random.Random(0)
    told = tasks.facts(rng, 8)
    text = "".join(piece.text for piece in tasks.document(rng, told, 1700, held_out=True))
    shared = ids(llm, start_of(text))[:1500]
    extra = [ids(llm, f"{tasks.filler(rng, 40, held_out=True)}{end_of(fact, rng)}") for fact in told]
    suffixes = [suffix[-rng.randint(40, 80) :] for suffix in extra]
    assert len(shared) == 1500
    assert all(40 <= len(suffix) <= 80 for suffix in suffixes)
    llm.generate([shared + suffix for suffix in suffixes], SamplingParams(max_tokens=1, temperature=0))
    assert llm._engine.runner.num_computed_tokens_total <= 1.05 * (1500 + sum(map(len, suffixes)))


# The same needles in four ways


def cold(samples: list[Sample]) -> list[str]:
    llm = make_llm(enable_prefix_caching=False)
    return [answers(llm, [sample])[0] for sample in samples]


def hit(samples: list[Sample], *, between: Callable[[LLM], None] = lambda llm: None) -> list[str]:
    """Each prompt goes on right behind its question, with the state that an earlier one left there.

    Only that state still knows what was asked. between: runs after the earlier one.
    """
    llm, texts = make_llm(), []
    for sample in samples:
        prompt = ids(llm, sample.prompt)
        llm.generate([prompt[:-2]], SamplingParams(max_tokens=1, temperature=0))
        between(llm)
        (output,) = llm.generate([prompt], ANSWER)
        assert output.num_cached_tokens == len(prompt) - 2
        texts.append(output.outputs[0].text)
    return texts


def batched(samples: list[Sample]) -> list[str]:
    llm, texts = make_llm(), []
    for number, sample in enumerate(samples):
        others = [recall_sample(random.Random(f"other {number} {other}"), 128, load()) for other in range(7)]
        texts.append(answers(llm, [*others[:3], sample, *others[3:]])[3])
    return texts


def preempted(samples: list[Sample]) -> list[str]:
    """Each request is stopped in the middle of its prompt, and once more in its answer."""
    llm = make_llm(max_num_batched_tokens=256)
    return [preempted_answer(llm._engine, ids(llm, sample.prompt), name) for name, sample in enumerate(samples)]


def preempted_answer(engine: Engine, prompt: list[int], number: int) -> str:
    engine.add_request(f"neighbour {number}", [(5 * number + i) % 2000 + 10 for i in range(300)], ANSWER)
    engine.add_request(f"victim {number}", prompt, ANSWER)
    text, at = "", [len(prompt) // 2, len(prompt)]
    while engine.has_unfinished_requests():
        text += "".join(o.outputs[0].text for o in engine.step() if o.request_id == f"victim {number}")
        victims = [request for request in engine.scheduler.running if request.request_id == f"victim {number}"]
        if at and victims and victims[0].num_computed_tokens > at[0]:
            engine.scheduler._preempt(victims[0])
            engine.reset_prefix_cache()
            del at[0]
    assert not at
    return text


WAYS: list[Callable[[list[Sample]], list[str]]] = [cold, hit, batched, preempted]


@pytest.mark.parametrize("way", WAYS)
def test_a_needle_is_found_in_every_way(way: Callable[[list[Sample]], list[str]]) -> None:
    samples = [needles(depth, 1, 400)[0] for depth in DEPTHS]
    assert way(samples) == [sample.answer for sample in samples]


def test_a_wrong_state_shows_as_a_wrong_answer() -> None:
    def forget(llm: LLM) -> None:
        for group, manager in zip(llm.memory_plan.groups, llm._engine.scheduler.coordinator.managers, strict=True):
            if group.block_size == ENDLESS:
                states = [block.block_id for block in manager.pool.blocks()]
                llm._engine.runner.cache.poison(group.group_id, states, 0.0)

    # Seven facts each, so that who forgot which was asked for is right by chance now and then.
    samples = [recall_sample(random.Random(f"state {number}"), 256, load()) for number in range(8)]
    assert num_right(samples, hit(samples)) == 8
    assert num_right(samples, hit(samples, between=forget)) <= 3


@pytest.mark.slow
def test_needles_in_1500_tokens_are_found_equally_often_in_every_way() -> None:
    found = {way.__name__: tuple(num_right(s, way(s)) for s in (needles(d, 10, 1500) for d in DEPTHS)) for way in WAYS}
    assert len(set(found.values())) == 1, found
    assert min(found["cold"]) >= 9, found


@pytest.mark.parametrize("count", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_what_was_said_512_tokens_ago_is_recalled_in_at_least_nine_of_ten_new_samples(llm: LLM, count: int) -> None:
    samples = [recall_sample(random.Random(f"test {number}"), 512, load()) for number in range(count)]
    assert num_right(samples, answers(llm, samples)) >= 0.9 * count
