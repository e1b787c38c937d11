"""Gemma 3 270M from its GGUF file against transformers on the same file, in float32, on real text."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_engine.models.base import Model
from hybrid_engine.models.registry import load_model
from hybrid_engine.tokenizer import load_tokenizer
from hybrid_engine.weights import open_checkpoint

pytestmark = pytest.mark.real_weights

TOLERANCE = 1e-3
"""Logits go up to 40; float32 sums in another order differ by 2e-4 at 3,000 tokens."""


def lengths(*slow: int) -> list:
    """Within the window of 512, the window exactly, beyond it, and where a wrong rope of either kind would show."""
    marks = pytest.mark.slow
    return [pytest.param(count, marks=marks if count in slow else ()) for count in (16, 512, 600, 1500, 3000)]


@pytest.fixture(scope="module")
def theirs(real_weights: Path) -> torch.nn.Module:
    """Load the file with transformers: half a minute, once."""
    return AutoModelForCausalLM.from_pretrained(
        real_weights.parent, gguf_file=real_weights.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def ours(real_weights: Path) -> Model:
    return load_model(open_checkpoint(real_weights), dtype=torch.float32)


@pytest.fixture(scope="module")
def tokens(real_weights: Path, excerpt: str) -> list[int]:
    return load_tokenizer(real_weights)(excerpt).input_ids


def largest_difference(a_TV: torch.Tensor, b_TV: torch.Tensor) -> float:
    # In slices: at 3,000 tokens each side is 3 GB already.
    differences = (a.sub(b).abs().max().item() for a, b in zip(a_TV.split(256), b_TV.split(256), strict=True))
    largest = max(differences)
    print(f"largest logit difference at {len(a_TV)} tokens: {largest:.2e}")
    return largest


@pytest.mark.parametrize("length", lengths(512, 1500, 3000))
def test_logits_equal_transformers(length, ours, theirs, tokens, paged_run):
    logits_TV = paged_run(ours, max_tokens=length, block_size=16).step({0: tokens[:length]})[0]
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([tokens[:length]])).logits[0]
    assert largest_difference(logits_TV, expected_TV) < TOLERANCE


@pytest.mark.parametrize("length", lengths(16, 512, 600, 1500, 3000))
def test_64_greedy_tokens_equal_transformers(length, ours, theirs, tokens, paged_run):
    run = paged_run(ours, max_tokens=length + 64, block_size=16)
    logits_V = run.step({0: tokens[:length]})[0][-1]
    chosen = []
    for _ in range(64):
        chosen.append(int(logits_V.argmax()))
        logits_V = run.step({0: chosen[-1:]})[0][-1]
    options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    assert chosen == theirs.generate(torch.tensor([tokens[:length]]), **options)[0, length:].tolist()


def test_the_layer_table_is_that_of_gemma_3_270m(ours):
    layers = ours.info.layers
    assert [layer.index for layer in layers if layer.kind == "full_attention"] == [5, 11, 17]
    assert {(layer.kind, layer.window, layer.rope_theta) for layer in layers} == {
        ("sliding_attention", 512, 1e4),
        ("full_attention", None, 1e6),
    }
    assert ours.info.num_parameters == 268_098_176


def perplexity(logits_TV: torch.Tensor, token_ids: list[int]) -> float:
    """Return exp of the mean negative log-likelihood of all tokens but the first."""
    next_ids_T = torch.tensor(token_ids[1:])
    total = 0.0
    for logits_XV, ids_X in zip(logits_TV[:-1].split(256), next_ids_T.split(256), strict=True):
        total += torch.nn.functional.cross_entropy(logits_XV.float(), ids_X, reduction="sum").item()
    return math.exp(total / len(next_ids_T))


@pytest.fixture(scope="module")
def expected_perplexity(theirs, tokens) -> float:
    with torch.inference_mode():
        return perplexity(theirs(torch.tensor([tokens[:2000]])).logits[0], tokens[:2000])


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 0.001), (torch.bfloat16, 0.01)])
def test_perplexity_equals_that_of_transformers_in_float32(
    dtype, tolerance, real_weights, tokens, expected_perplexity, paged_run
):
    model = load_model(open_checkpoint(real_weights), dtype=dtype)
    run = paged_run(model, max_tokens=2000, block_size=16)
    found = perplexity(run.step({0: tokens[:2000]})[0], tokens[:2000])
    print(f"perplexity of 2,000 tokens: {found:.4f} in {dtype}, {expected_perplexity:.4f} by transformers in float32")
    assert found == pytest.approx(expected_perplexity, rel=tolerance)
