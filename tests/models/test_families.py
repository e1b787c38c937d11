"""Logits of every family against transformers, in float32, one forward of the whole text by theirs.

Theirs never continues a cache here: that isn't right in all of them, and nothing here depends on it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attention_families import FAMILIES, GENERIC
from delta_families import FAMILIES as DELTA
from logits import check_close, random_tokens, their_logits

from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

ATTENTION = FAMILIES | GENERIC
MODELS = ATTENTION | DELTA
QUICK = (*FAMILIES, *DELTA, "deepseek_v3", "flint", "smollm3")


def each(names):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]
    )


every_family = each(MODELS)


@every_family
@pytest.mark.parametrize("length", [48, 200])
def test_logits_equal_transformers(name, length, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens = random_tokens(length)
    check_close(paged_run(ours, max_tokens=length).step({0: tokens})[0], their_logits(theirs, tokens))


@every_family
def test_three_texts_of_other_lengths_in_chunks_and_token_by_token_side_by_side(name, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    texts = [random_tokens(length, seed=length) for length in (61, 40, 23)]
    run = paged_run(ours, num_requests=3)
    bounds = [(0, 1, 8, 9, 29, 55, 58, *range(59, 62)), (0, 25, *range(26, 41)), tuple(range(24))]
    found: list[list[torch.Tensor]] = [[], [], []]
    spans = [list(pairwise(bound)) for bound in bounds]
    for step in range(max(map(len, spans))):
        chunks = {i: texts[i][slice(*spans[i][step])] for i in range(3) if step < len(spans[i])}
        for request, logits_TV in run.step(chunks).items():
            found[request].append(logits_TV)
    for text, pieces in zip(texts, found, strict=True):
        check_close(torch.cat(pieces), their_logits(theirs, text))


@each(ATTENTION)
def test_a_text_that_goes_on_in_anothers_blocks_is_as_cold(name, tiny, paged_run):
    _, ours = tiny(*MODELS[name]())
    text = random_tokens(70)
    run = paged_run(ours, num_requests=2, max_tokens=80)
    cold_TV = run.step({0: text})[0]
    for tables in run.tables.values():  # 36 tokens are nine blocks
        tables[1][:9] = tables[0][:9]
    run.token_ids[1] = text[:36]
    check_close(run.step({1: text[36:]})[1], cold_TV[36:])


def test_longrope_turns_all_texts_by_the_factors_of_the_longest_that_the_model_may_reach(tiny, paged_run):
    """transformers decides by each forward's length, so that only its long one is compared."""
    model_class, config = MODELS["phi3 with longrope"]()
    config.rope_parameters |= {"original_max_position_embeddings": 64, "attention_factor": None}
    config.original_max_position_embeddings = 64
    theirs, ours = tiny(model_class, config)
    tokens = random_tokens(200)
    expected_TV = their_logits(theirs, tokens)
    run = paged_run(ours, max_tokens=200)
    logits_TV = torch.cat([run.step({0: tokens[start:stop]})[0] for start, stop in ((0, 48), (48, 70), (70, 200))])
    check_close(logits_TV, expected_TV)
    # The model turns by 4 times as many positions: sqrt(1 + log(4) / log(64)).
    assert ours.info.layers[0].rope.magnitude == pytest.approx((1 + 1 / 3) ** 0.5)


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, *DELTA])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path, save_tiny, tiny, paged_run, device):
    model_class, config = MODELS[name]()
    exact, _ = tiny(model_class, config)
    save_tiny(model_class, config, tmp_path)
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16, device=device)
    tokens = random_tokens(48)
    expected_TV = their_logits(exact, tokens)
    our_error = (paged_run(ours).step({0: tokens})[0] - expected_TV).square().mean().sqrt()
    their_error = (their_logits(theirs, tokens) - expected_TV).square().mean().sqrt()
    # Half as much again: where a router wavers between two experts, either rounding may be the unlucky one.
    assert our_error < 1.5 * their_error
