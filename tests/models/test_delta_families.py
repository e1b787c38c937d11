"""What only families with delta nets need; what all need is in test_families.py."""

from __future__ import annotations

import json
import re

import pytest
import torch
from delta_families import FAMILIES
from logits import check_close, random_tokens, their_logits
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

every_family = pytest.mark.parametrize("name", FAMILIES)


@pytest.mark.slow
@every_family
@pytest.mark.usefixtures("interpreted")
def test_what_a_gpu_runs_gives_the_logits_of_transformers(name, tiny, paged_run):
    theirs, ours = tiny(*FAMILIES[name]())
    text, other = random_tokens(25), random_tokens(5, seed=2)
    run = paged_run(ours, num_requests=2)
    steps = [{0: text[:20]}, {0: text[20:21], 1: other}, {0: text[21:]}]
    found = [run.step(step) for step in steps]
    check_close(torch.cat([logits[0] for logits in found]), their_logits(theirs, text))
    check_close(found[1][1], their_logits(theirs, other))


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
