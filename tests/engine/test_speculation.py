"""Drafts through the whole engine: whoever guesses, and however well, the answers are those of a run without."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from tiny_engines import TinyEngines
from tiny_models import save_tiny_model

from hybrid_engine import LLM, SamplingParams, SpeculativeConfig, StructuredOutputsParams
from hybrid_engine.demo.conversations import HANDBOOK
from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.invariants import check_invariants
from hybrid_engine.models.registry import load_model
from hybrid_engine.speculation.draft_model import DraftModelDrafter
from hybrid_engine.speculation.ngram import NgramDrafter
from hybrid_engine.tokenizer import load_tokenizer
from hybrid_engine.weights import open_checkpoint

NUM_DRAFTS = 3
PROMPTS = ["abcabcabcabcab", "one two one two one two one", "x", "a b c d e f g h"]
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=24),
    "sampled": SamplingParams(temperature=0.7, top_k=5, seed=3, max_tokens=24, n=2),
    "penalised": SamplingParams(
        temperature=0.4, seed=4, max_tokens=24, repetition_penalty=1.1, frequency_penalty=0.3, min_tokens=9, logprobs=2
    ),
    "stopped": SamplingParams(temperature=0.9, seed=5, max_tokens=60, stop=("e", "ab"), stop_token_ids=(40, 41, 42)),
    "structured": SamplingParams(
        seed=6, max_tokens=60, structured_outputs=StructuredOutputsParams(regex="(abc|one ){3,9}[xy]")
    ),
}


SLOW_MODELS = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "bamba", "mamba2")]


@pytest.fixture(scope="module", params=["gemma3", "jamba", *SLOW_MODELS])
def engines(request, byte_tokenizer, tmp_path_factory) -> TinyEngines:
    folder = tmp_path_factory.mktemp("tiny")
    # Small weights make answers that repeat themselves, so that n-grams are found.
    save_tiny_model(request.param, folder, initializer_range=0.08)
    checkpoint = open_checkpoint(folder)
    return TinyEngines(load_model(checkpoint, dtype=torch.float32), checkpoint.config, byte_tokenizer)


class Oracle:
    """Knows each prompt's answer and guesses it with every third guess wrong at a place that wanders."""

    def __init__(self, answers: dict[tuple[int, ...], list[int]]) -> None:
        self.answers = answers
        self.num_asked = 0

    def propose(self, requests, max_drafts):
        drafts = []
        for request, most in zip(requests, max_drafts, strict=True):
            known = request.num_output_tokens
            right = self.answers[tuple(request.token_ids[: request.num_prompt_tokens])][known : known + most]
            self.num_asked += 1
            wrong_at = self.num_asked % 4 if self.num_asked % 3 == 0 else -1
            drafts.append(tuple((token + 1) % 259 if i == wrong_at else token for i, token in enumerate(right)))
        return drafts

    def observe(self, request, num_drafts, num_accepted):
        pass


def assert_same(ours, plain) -> None:
    for mine, other in zip(ours, plain, strict=True):
        for answer, expected in zip(mine.outputs, other.outputs, strict=True):
            assert (answer.token_ids, answer.text) == (expected.token_ids, expected.text)
            assert (answer.finish_reason, answer.stop_reason) == (expected.finish_reason, expected.stop_reason)
            if expected.logprobs is not None:
                assert answer.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-2)
                assert [set(position) for position in answer.logprobs] == [set(each) for each in expected.logprobs]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_looking_up_ngrams_changes_no_answer(engines, sampling):
    plain = engines.make().generate(PROMPTS, sampling)
    llm = engines.make(drafter=NgramDrafter(min_tokens=1, max_tokens=3), draft_slots=NUM_DRAFTS)
    assert_same(llm.generate(PROMPTS, sampling), plain)
    assert llm._engine.scheduler.drafting.num_drafts > 0
    check_invariants(llm._engine.scheduler.coordinator, [])


@pytest.mark.parametrize(
    "memory",
    [
        pytest.param({}, marks=pytest.mark.slow, id="roomy"),
        pytest.param({"num_blocks": 24, "num_states": 16}, id="short"),
    ],
)
@pytest.mark.parametrize("kind", ["greedy", "stopped", "structured"])
def test_good_drafts_with_wrong_ones_between_change_no_answer(engines, kind, memory):
    sampling = SAMPLINGS[kind]
    plain = engines.make().generate(PROMPTS, sampling)
    # What comes after the answer's end is guessed too.
    endless = plain
    if kind != "structured":
        endless = engines.make().generate(
            PROMPTS, replace(sampling, max_tokens=80, ignore_eos=True, stop=(), stop_token_ids=())
        )
    answers = {tuple(each.prompt_token_ids): [*each.outputs[0].token_ids, 5, 6, 7] for each in endless}
    llm = engines.make(drafter=Oracle(answers), draft_slots=NUM_DRAFTS, **memory)
    outputs = llm.generate(PROMPTS, sampling)
    assert_same(outputs, plain)
    drafting = llm._engine.scheduler.drafting
    assert 0.5 < drafting.num_accepted / drafting.num_drafts < 1
    assert sum(output.metrics.num_accepted_tokens for output in outputs) == drafting.num_accepted
    assert sum(output.metrics.num_draft_tokens for output in outputs) == drafting.num_drafts
    has_attention = any(group.block_size != ENDLESS for group in llm.memory_plan.groups)
    if kind != "structured":  # those answers are short
        assert bool(llm._engine.scheduler.stats.num_preemptions) == (bool(memory) and has_attention)


def test_the_tokens_of_many_seeds_are_distributed_as_the_model_says(engines):
    """χ² of pairs of tokens, the second of which a draft has guessed, against the model's own probabilities."""
    num_seeds, prompt, ask = 500, PROMPTS[0], SamplingParams(temperature=0, max_tokens=1, logprobs=TOP_K)
    plain = engines.make()
    prompt_token_ids = plain.get_tokenizer()(prompt)["input_ids"]
    first = probabilities(plain.generate([prompt_token_ids], ask)[0])
    second = {token: probabilities(plain.generate([[*prompt_token_ids, token]], ask)[0]) for token in first}
    expected = {(a, b): num_seeds * p * q for a, p in first.items() for b, q in second[a].items()}
    favourites = Favourites({token: max(found, key=found.get) for token, found in second.items()})
    llm = engines.make(drafter=favourites, draft_slots=2, max_num_seqs=64)
    samplings = [SamplingParams(top_k=TOP_K, seed=seed, max_tokens=3, ignore_eos=True) for seed in range(num_seeds)]
    outputs = llm.generate([prompt] * num_seeds, samplings)
    counts = Counter(tuple(output.outputs[0].token_ids[:2]) for output in outputs)
    assert sum(counts[pair] for pair in expected) == num_seeds
    chi_squared = sum((counts[pair] - count) ** 2 / count for pair, count in expected.items())
    assert chi_squared < 26.1, "8 degrees of freedom: a fair sampler exceeds this once in 1,000 times"
    # Where states are short some requests go without.
    assert num_seeds >= llm._engine.scheduler.drafting.num_drafts > num_seeds / 2


TOP_K = 3


def probabilities(output) -> dict[int, float]:
    """Return the chances of the TOP_K likeliest tokens when only those may be drawn."""
    found = {token: each.logprob for token, each in output.outputs[0].logprobs[0].items()}
    return dict(zip(found, torch.tensor(list(found.values())).softmax(0).tolist(), strict=True))


class Favourites:
    """Guesses one token, by the last known one."""

    def __init__(self, favourite_of: dict[int, int]) -> None:
        self.favourite_of = favourite_of

    def propose(self, requests, max_drafts):
        return [
            (self.favourite_of.get(request.token_ids[-1], 5),)[:most]
            for request, most in zip(requests, max_drafts, strict=True)
        ]

    def observe(self, request, num_drafts, num_accepted):
        pass


def test_a_model_that_drafts_for_itself_is_always_right(engines):
    helper = engines.make()._engine
    drafter = DraftModelDrafter(helper.scheduler, helper.runner, max_model_len=256)
    llm = engines.make(drafter=drafter, draft_slots=4)
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=1.2, seed=1, max_tokens=21, ignore_eos=True))
    for output in outputs:
        # One token with the prompt, then four steps of five.
        assert output.metrics.num_accepted_tokens == output.metrics.num_draft_tokens == 16


@pytest.fixture(scope="module")
def checkpoints(byte_tokenizer, tmp_path_factory):
    """Save a model, by kind and number of layers, with its tokenizer; return the folder."""

    def save(name: str, *, tokenizer=byte_tokenizer, **changes):
        folder = tmp_path_factory.mktemp("tiny")
        save_tiny_model(name, folder, initializer_range=0.08, **changes)
        tokenizer.save_pretrained(folder)
        return folder

    return save


SETTINGS = {"cache_memory_bytes": "4MiB", "block_size": 4, "dtype": "float32", "max_model_len": 200}


@pytest.mark.parametrize("names", [("gemma3", "llama"), ("jamba", "bamba")], ids="-".join)
@pytest.mark.parametrize("sampling", [SAMPLINGS["penalised"], SAMPLINGS["stopped"]], ids=["penalised", "stopped"])
def test_a_draft_model_changes_no_answer(checkpoints, names, sampling):
    model, draft = map(checkpoints, names)
    plain = LLM(model, **SETTINGS).generate(PROMPTS, sampling)
    llm = LLM(model, speculative=SpeculativeConfig("draft_model", NUM_DRAFTS, draft), **SETTINGS)
    assert_same(llm.generate(PROMPTS, sampling), plain)
    assert llm._engine.scheduler.drafting.num_drafts > 0


def test_ngrams_are_set_up_by_name(checkpoints):
    llm = LLM(checkpoints("gemma3"), speculative=SpeculativeConfig(num_speculative_tokens=2), **SETTINGS)
    (output,) = llm.generate("abcabcabcabcabcabc", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    assert output.metrics.num_draft_tokens > 0


def test_a_draft_model_of_another_vocabulary_is_refused(checkpoints):
    with pytest.raises(ConfigError, match=r"vocabulary of 300 tokens, the model one of 259"):
        LLM(
            checkpoints("llama"),
            speculative=SpeculativeConfig("draft_model", model=checkpoints("llama", vocab_size=300)),
            **SETTINGS,
        )


def test_a_draft_model_of_another_tokenizer_is_refused(checkpoints):
    draft = checkpoints("llama")
    file = draft / "tokenizer.json"
    file.write_text(file.read_text().replace('"<pad>"', '"<blank>"'))
    (draft / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match="has another tokenizer: 2 entries differ, such as '<"):
        LLM(checkpoints("llama"), speculative=SpeculativeConfig("draft_model", model=draft), **SETTINGS)


@pytest.mark.parametrize("temperature", [0, 0.8], ids=["greedy", "sampled"])
def test_the_trained_hybrid_says_the_same_with_and_without_drafts(temperature):
    prompts = ["The code of Belora is 4071. The ship of Moki is grifen. " * 5, "The code of Belora is 4071."]
    sampling = SamplingParams(temperature=temperature, seed=3, max_tokens=64, ignore_eos=True)
    plain = LLM(cache_memory_bytes="16MiB").generate(prompts, sampling)
    outputs = LLM(cache_memory_bytes="16MiB", speculative=SpeculativeConfig()).generate(prompts, sampling)
    assert_same(outputs, plain)
    assert sum(output.metrics.num_accepted_tokens for output in outputs) > 5


@pytest.mark.real_weights
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "temperature", [pytest.param(0, marks=pytest.mark.slow, id="greedy"), pytest.param(0.8, id="sampled")]
)
def test_the_real_model_says_the_same_with_and_without_drafts(real_weights, temperature):
    """In bfloat16, where the last bit of a logit decides a draw: see kernels/attention on tokens computed alike."""
    checkpoint = open_checkpoint(real_weights)
    tokenizer = load_tokenizer(checkpoint.path)
    engines = TinyEngines(load_model(checkpoint, dtype=torch.bfloat16), checkpoint.config, tokenizer)
    settings = {"dtype": "bfloat16", "cache_memory_bytes": "64MiB", "block_size": 16, "max_model_len": 512}
    prompt = f"{HANDBOOK[:900]}\n\nOnce more, word for word:\n\n{HANDBOOK[:150]}"
    sampling = SamplingParams(temperature=temperature, seed=1, max_tokens=40, ignore_eos=True)
    (plain,) = engines.make(**settings).generate(prompt, sampling)
    drafter = NgramDrafter(min_tokens=2, max_tokens=4)
    (output,) = engines.make(**settings, drafter=drafter, draft_slots=5).generate(prompt, sampling)
    assert output.outputs[0].token_ids == plain.outputs[0].token_ids
    assert output.metrics.num_accepted_tokens > 10


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "magic"}, "method is 'magic', must be 'ngram' or 'draft_model'"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens is 0, must be from 1 to 16"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens is 17, must be from 1 to 16"),
        ({"num_speculative_tokens": 2.5}, "num_speculative_tokens is 2.5, must be an integer"),
        ({"prompt_lookup_min": 5}, "prompt_lookup_min is 5 and prompt_lookup_max 4"),
        ({"method": "draft_model"}, "name the draft model as model="),
        ({"model": "small"}, "model is 'small', which method 'ngram' has no use for"),
        (
            {"method": "draft_model", "model": "small", "draft_cache_memory_bytes": 0},
            "draft_cache_memory_bytes is 0, must be above 0",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        SpeculativeConfig(**settings)


def test_a_speculative_that_is_no_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="speculative is 'ngram', must be a SpeculativeConfig, or None"):
        LLM(tmp_path, speculative="ngram")
