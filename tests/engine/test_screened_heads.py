"""Greedy answers by a head's screen are those of all logits, alone and in the company of requests that need logits."""

import pytest
from tiny_models import save_tiny_model

from hybrid_engine import LLM, SamplingParams, SpeculativeConfig
from hybrid_engine.kernels.linear import Screen
from hybrid_engine.kernels.native.builder import find_compiler
from hybrid_engine.models.layers import linear

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

PROMPTS = ["abcabcabcabcab", "one two one two one two one", "x", "a b c d e f g h"]
GREEDY = SamplingParams(temperature=0, max_tokens=40)
SETTINGS = {"cache_memory_bytes": "4MiB", "block_size": 4, "dtype": "float32", "max_model_len": 200}


@pytest.fixture(scope="module", params=["gemma3", "jamba", "mamba2"])
def checkpoint(request, byte_tokenizer, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny_model(request.param, folder, initializer_range=0.08)
    byte_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def screened(monkeypatch):
    """Makes models with a screen, however small their heads; how many rows each call found."""
    monkeypatch.setattr(linear, "LEAST_SCREENED_BYTES", 0)
    found, highest = [], Screen.highest

    def watched(screen, x_TK, **options):
        found_T = highest(screen, x_TK, **options)
        found.append(0 if found_T is None else len(found_T))
        return found_T

    monkeypatch.setattr(Screen, "highest", watched)
    return found


def answers(llm, prompts, sampling):
    return [output.outputs[0].token_ids for output in llm.generate(prompts, sampling)]


def test_greedy_answers_are_those_of_all_logits(checkpoint, screened, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(linear, "LEAST_SCREENED_BYTES", 1 << 60)
        wanted = answers(LLM(checkpoint, **SETTINGS), PROMPTS, GREEDY)
    assert not screened
    assert answers(LLM(checkpoint, **SETTINGS), PROMPTS, GREEDY) == wanted
    assert sum(screened) == sum(map(len, wanted))


def test_drafts_are_verified_by_it(checkpoint, screened):
    wanted = answers(LLM(checkpoint, **SETTINGS), PROMPTS, GREEDY)
    screened.clear()
    llm = LLM(checkpoint, speculative=SpeculativeConfig(num_speculative_tokens=3), **SETTINGS)
    assert answers(llm, PROMPTS, GREEDY) == wanted
    assert llm._engine.scheduler.drafting.num_drafts > 0
    assert sum(screened) > sum(map(len, wanted))


@pytest.mark.parametrize(
    "other",
    [
        SamplingParams(temperature=0.8, seed=3, max_tokens=20),
        SamplingParams(temperature=0, max_tokens=20, logprobs=2),
        SamplingParams(temperature=0, max_tokens=20, frequency_penalty=0.5),
        SamplingParams(temperature=0, max_tokens=20, min_tokens=15),
    ],
    ids=["sampled", "logprobs", "penalised", "min_tokens"],
)
def test_beside_requests_that_need_logits(checkpoint, screened, other):
    llm = LLM(checkpoint, **SETTINGS)
    alone = answers(llm, PROMPTS[:2], GREEDY) + answers(llm, PROMPTS[2:], other)
    screened.clear()
    assert answers(llm, PROMPTS, [GREEDY, GREEDY, other, other]) == alone
    num_steps = max(map(len, alone))
    assert 0 < len(screened) < num_steps, "logits were needed as long as the others ran, and no longer"


def test_a_model_with_a_softcap_has_none(byte_tokenizer, tmp_path, screened):
    """It makes scores equal, of which the first counts, that a screen's bounds take for different."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=259, hidden_size=48, intermediate_size=56, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, eos_token_id=1, pad_token_id=2, bos_token_id=0,
    )  # fmt: skip
    assert config.final_logit_softcapping
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    byte_tokenizer.save_pretrained(tmp_path)
    LLM(tmp_path, **SETTINGS).generate(PROMPTS, GREEDY)
    assert not screened
