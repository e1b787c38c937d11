"""Exact engines: what a model says behind a prefix has the same bits however the prefix was computed."""

import os
from pathlib import Path

import pytest
import torch
from exact_cases import BUDGETS, ExactCases
from scripted_engine import make_byte_tokenizer
from tiny_hybrids import make

from hybrid_engine import LLM, tiny_hybrid
from hybrid_engine.errors import ConfigError
from hybrid_engine.exactness import check_exact
from hybrid_engine.kernels import native
from hybrid_engine.models.registry import load_model
from hybrid_engine.tokenizer import load_tokenizer
from hybrid_engine.weights import open_checkpoint

TEXT = Path(__file__).parent.parent / "data" / "war_and_peace_excerpt.txt"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
CASES_VARIABLE = "HYBRID_ENGINE_EXACT_CASES"
"""How many cases the slow tests make for each model and dtype; docs/results has runs of 1,000."""
KINDS = ["with a hit", "preemptions", "drafts computed", "drafts accepted"]
FAMILIES = ["three kinds", "jamba", "qwen3_next"]
SLOW_FAMILIES = ["bamba", "falcon_h1", "nemotron_h", "zamba2", "recurrent_gemma", "kimi_linear", "minimax", "lfm3"]


def make_cases(path: Path, tokenizer, dtype: torch.dtype, *, exact: bool = True, **options) -> ExactCases:
    checkpoint = open_checkpoint(path)
    ids = tokenizer(TEXT.read_text())["input_ids"]
    texts = [ids[900 * k : 900 * k + 700] for k in range(4)]
    model = load_model(checkpoint, dtype=dtype, exact=exact)
    return ExactCases(model, checkpoint.config, tokenizer, texts, **options)


def make_tiny(name: str, folder: Path, dtype: torch.dtype) -> ExactCases:
    tiny = make(name, folder)
    settings = {"max_model_len": 150, "block_sizes": tiny.block_sizes}
    return make_cases(tiny.folder, make_byte_tokenizer(), dtype, lengths=[3, 17, 31, 60], settings=settings)


def make_trained(dtype: torch.dtype, *, exact: bool = True) -> ExactCases:
    path = Path(tiny_hybrid.find_model(tiny_hybrid.NAME))
    settings = {"max_model_len": 400, "cache_memory_bytes": "64MiB"}
    lengths = [1, 5, 16, 17, 33, 64, 65, 120, 200]
    return make_cases(path, load_tokenizer(path), dtype, exact=exact, lengths=lengths, settings=settings)


def assert_same(cases: ExactCases, num_cases: int) -> None:
    cases.run(num_cases)
    assert not cases.bits.num_different.total(), cases.bits.num_different
    assert min(cases.bits.num_again.values()) > num_cases, cases.bits.num_again


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_trained_hybrid_has_the_same_bits_in_every_way(dtype):
    cases = make_trained(dtype)
    assert_same(cases, 20)
    assert cases.counts["with a hit"] > 0


def test_without_it_bits_do_differ():
    cases = make_trained(torch.float32, exact=False)
    cases.run(20)
    assert cases.bits.num_different["hidden states"] > 0


@pytest.mark.parametrize("name", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_FAMILIES)])
def test_other_kinds_of_memory_have_the_same_bits_in_every_way(name, tmp_path):
    assert_same(make_tiny(name, tmp_path, torch.float32), 8)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_many_cases_of_the_trained_hybrid(dtype):
    cases = make_trained(dtype)
    assert_same(cases, int(os.environ.get(CASES_VARIABLE, "60")))
    wanted = [*KINDS, "tokens from the host tier", "with prompt_logprobs"]
    assert all(cases.counts[kind] for kind in wanted), cases.counts


@pytest.mark.slow
@pytest.mark.real_weights
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_many_cases_of_gemma(real_weights, dtype):
    """The last prompts are longer than its window of 512 tokens."""
    tokenizer = load_tokenizer(open_checkpoint(real_weights).path)
    settings = {"max_model_len": 1000, "cache_memory_bytes": "192MiB"}
    budgets = [budget for budget in BUDGETS if budget > 1]
    common = {"budgets": budgets, "company": (8, 14), "settings": settings}
    cases = make_cases(real_weights, tokenizer, dtype, lengths=[1, 9, 16, 17, 25, 33, 40], **common)
    assert_same(cases, int(os.environ.get(CASES_VARIABLE, "40")))
    assert all(cases.counts[kind] for kind in KINDS), cases.counts
    cases.lengths, cases.budgets, cases.company = [540, 590], (300, 2048), (2, 3)
    assert_same(cases, cases.counts["cases"] + 4)


# What is refused


def test_it_is_refused_where_torch_alone_would_compute(monkeypatch):
    monkeypatch.setattr(native, "prepare", lambda: {"linear": True, "attention": False})
    with pytest.raises(ConfigError, match="attention would run on torch alone"):
        LLM("tiny-hybrid", exact=True)


def test_it_is_refused_for_models_that_transformers_code_runs():
    with pytest.raises(ConfigError, match="'gpt2' runs on transformers' code"):
        check_exact(True, {"model_type": "gpt2"}, device_type="cpu")


def test_fp8_is_refused():
    with pytest.raises(ConfigError, match="quantization is 'fp8'"):
        check_exact(True, {"model_type": "llama"}, device_type="cuda", quantization="fp8")


def test_it_must_be_true_or_false():
    with pytest.raises(ConfigError, match="exact is 'yes', must be True or False"):
        LLM("tiny-hybrid", exact="yes")


def test_an_exact_engine_says_what_a_plain_one_says():
    prompts = ["The prince looked at her", "Once more"]
    plain, exact = (LLM("tiny-hybrid", exact=each, cache_memory_bytes="32MiB") for each in (False, True))
    texts = [[output.outputs[0].text for output in llm.generate(prompts)] for llm in (plain, exact)]
    assert texts[0] == texts[1]
