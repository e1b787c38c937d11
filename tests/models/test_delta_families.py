"""Logits of families with delta nets against transformers, in float32, one forward of the whole text by theirs.

Theirs never continues a cache here: that isn't right in all of them, and nothing here depends on it.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
import torch
from delta_families import FAMILIES
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

TOLERANCE = 1e-3
"""Of the logits' deviation: sums of some hundred float32 terms in another order, through a few layers."""

every_family = pytest.mark.parametrize("name", FAMILIES)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


def check_close(logits_TV: torch.Tensor, expected_TV: torch.Tensor) -> None:
    deviation = expected_TV.std().item()
    assert deviation > 0.05
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE * deviation)


@every_family
@pytest.mark.parametrize("length", [48, 200])
def test_logits_equal_transformers(name, length, tiny, paged_run):
    theirs, ours = tiny(*FAMILIES[name]())
    tokens = random_tokens(length)
    check_close(paged_run(ours, max_tokens=length).step({0: tokens})[0], their_logits(theirs, tokens))


@every_family
def test_three_texts_of_other_lengths_in_chunks_and_token_by_token_side_by_side(name, tiny, paged_run):
    theirs, ours = tiny(*FAMILIES[name]())
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


@pytest.mark.slow
@every_family
def test_what_a_gpu_runs_gives_the_logits_of_transformers(name, tiny, paged_run, request):
    theirs, ours = tiny(*FAMILIES[name]())
    text, other = random_tokens(25), random_tokens(5, seed=2)
    request.getfixturevalue("interpreted")  # from here on
    run = paged_run(ours, num_requests=2)
    steps = [{0: text[:20]}, {0: text[20:21], 1: other}, {0: text[21:]}]
    found = [run.step(step) for step in steps]
    check_close(torch.cat([logits[0] for logits in found]), their_logits(theirs, text))
    check_close(found[1][1], their_logits(theirs, other))


@every_family
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path, save_tiny, tiny, paged_run, device):
    model_class, config = FAMILIES[name]()
    exact, _ = tiny(model_class, config)
    save_tiny(model_class, config, tmp_path)
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16, device=device)
    tokens = random_tokens(50)
    expected_TV = their_logits(exact, tokens)
    our_error = (paged_run(ours).step({0: tokens})[0] - expected_TV).square().mean().sqrt()
    their_error = (their_logits(theirs, tokens) - expected_TV).square().mean().sqrt()
    # Half as much again: where a router wavers between two experts, either rounding may be the unlucky one.
    assert our_error < 1.5 * their_error


@pytest.mark.parametrize(
    ("name", "renames"),
    [
        ("kimi_linear", {r"\.1\.block_sparse_moe\.": ".1.mlp."}),
        ("olmo_hybrid", {r"\.1\.feedforward_layer_norm\.": ".1.post_attention_layernorm."}),
        ("minimax", {r"\.block_sparse_moe\.": ".mlp."}),
    ],
    ids=["kimi: a dense mlp", "olmo: a norm behind attention", "minimax: experts"],
)
def test_either_name_of_a_part_is_read(name, renames, tmp_path, save_tiny, tiny, paged_run, device):
    """transformers writes one of them; what it read, and what published checkpoints have, may be the other."""
    save_tiny(*FAMILIES[name](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    (pattern, replacement), *_ = renames.items()
    renamed = {re.sub(pattern, replacement, one): tensor for one, tensor in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, file, {"format": "pt"})
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.float32, device=device)
    check_close(paged_run(ours).step({0: [5, 6, 7]})[0], their_logits(tiny(*FAMILIES[name]())[0], [5, 6, 7]))


def test_two_names_of_one_weight_are_refused(tmp_path, save_tiny):
    save_tiny(*FAMILIES["olmo_hybrid"](), tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.0.input_layernorm.weight"] = tensors["model.layers.0.attention_layer_norm.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"which are names of one weight"):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32)


def test_the_language_model_inside_a_multimodal_qwen_is_read_and_nothing_else(
    tmp_path, save_tiny, tiny, paged_run, device
):
    model_class, config = FAMILIES["qwen3_5_text"]()
    save_tiny(model_class, config, tmp_path)
    nested = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "qwen3_5", "text_config": nested, "vision_config": {"depth": 1}}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"tie_word_embeddings": False}))
    tensors = load_file(tmp_path / "model.safetensors")
    renamed = {re.sub(r"^model\.", "model.language_model.", one): tensor for one, tensor in tensors.items()}
    others = {"model.visual.patch_embed.proj.weight": torch.ones(2), "mtp.fc.weight": torch.ones(2)}
    save_file(renamed | others, tmp_path / "model.safetensors", {"format": "pt"})
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.float32, device=device)
    check_close(paged_run(ours).step({0: [5, 6, 7]})[0], their_logits(tiny(model_class, config)[0], [5, 6, 7]))
