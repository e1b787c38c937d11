"""Every tensor is accounted for when a model is filled."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import open_checkpoint
from hybrid_engine.weights.loader import load_weights
from hybrid_engine.weights.parts import Part, Weight

EMBEDDING = "model.embed_tokens.weight"
LAYER_2 = "model.layers.2.self_attn.k_proj.weight"


def edit(folder: Path, *, drop: tuple[str, ...] = (), **added: torch.Tensor) -> None:
    file = folder / "model.safetensors"
    kept = {name: tensor.clone() for name, tensor in load_file(file).items() if name not in drop}
    save_file(kept | added, file)


def load(folder: Path):
    return load_model(open_checkpoint(folder), dtype=torch.float32)


def test_the_layer_table_counts_as_many_parameters_as_transformers(folder, gemma):
    info = describe_model(open_checkpoint(folder).config)
    assert info.num_parameters == gemma.num_parameters()


def test_loaded_weights_are_stacked_in_the_order_that_layers_split_them(folder, gemma):
    attention = gemma.model.layers[2].self_attn
    expected_NK = torch.cat([attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight])
    assert torch.equal(load(folder).layers[2].attention.qkv.packed.weight_NK(), expected_NK)


def test_a_missing_tensor_is_named(folder):
    edit(folder, drop=(LAYER_2,))
    with pytest.raises(CheckpointError, match=f"lacks {LAYER_2}$"):
        load(folder)


def test_a_head_that_should_be_there_is_missed_with_a_hint(folder):
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"lacks lm_head.weight; its config says that the head isn't tied"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    edit(folder, **{LAYER_2: torch.zeros(63, 96)})
    with pytest.raises(CheckpointError, match=rf"{LAYER_2} has shape \[63, 96\], its config implies \[64, 96\]"):
        load(folder)


def test_a_tensor_that_nothing_reads_is_named(folder):
    edit(folder, **{"model.layers.2.self_attn.sinks": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"tensors that nothing reads: model.layers.2.self_attn.sinks"):
        load(folder)


def test_a_layer_more_than_the_config_says_is_not_ignored(folder):
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": 6, "layer_types": config["layer_types"][:6]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"nothing reads: model.layers.6.*and \d+ more"):
        load(folder)


@pytest.mark.parametrize(("value", "word"), [(torch.nan, "NaN"), (-torch.inf, "infinity")], ids=["nan", "infinity"])
def test_a_value_that_is_not_finite_is_found(value, word, folder, gemma):
    broken = gemma.model.layers[2].self_attn.k_proj.weight.detach().clone()
    broken[-1, -1] = value
    edit(folder, **{LAYER_2: broken})
    with pytest.raises(CheckpointError, match=rf"{word} in .*{LAYER_2}"):
        load(folder)


def test_integer_weights_are_refused(folder, gemma):
    edit(folder, **{LAYER_2: gemma.model.layers[2].self_attn.k_proj.weight.detach().to(torch.int8)})
    with pytest.raises(CheckpointError, match=rf"{LAYER_2} is stored as int8, must be a float"):
        load(folder)


def test_derived_tensors_of_old_checkpoints_are_left_alone(folder):
    edit(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)})
    load(folder)


def test_a_stored_copy_of_a_tied_head_is_accepted(folder, gemma):
    edit(folder, **{"lm_head.weight": gemma.model.embed_tokens.weight.detach().clone()})
    load(folder)


def test_a_tied_head_that_differs_from_the_embedding_is_refused(folder):
    edit(folder, **{"lm_head.weight": torch.zeros(64, 96)})
    with pytest.raises(CheckpointError, match=r"lm_head.weight differs from the embedding, though the config ties"):
        load(folder)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", ""], ids=["old", "new", "bare"])
def test_a_decoder_is_found_inside_a_larger_checkpoint(folder, gemma, prefix):
    tensors = load_file(folder / "model.safetensors")
    renamed = {prefix + name.removeprefix("model."): tensor.clone() for name, tensor in tensors.items()}
    images = {"vision_tower.patch.weight": torch.zeros(2), "model.multi_modal_projector.scale": torch.zeros(2)}
    save_file(renamed | images, folder / "model.safetensors")
    embedding = load(folder).embedding.packed.weight_NK()
    assert torch.equal(embedding, gemma.model.embed_tokens.weight)


def test_an_old_multimodal_checkpoint_brings_its_head(folder, gemma):
    tensors = load_file(folder / "model.safetensors")
    renamed = {"language_model." + name: tensor.clone() for name, tensor in tensors.items()}
    renamed["language_model.lm_head.weight"] = tensors[EMBEDDING] + 1
    save_file(renamed, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": config}))
    assert torch.equal(load(folder).head.packed.weight_NK(), gemma.model.embed_tokens.weight + 1)


def test_two_weights_cannot_be_filled_from_one_tensor(folder):
    weight = Weight("weight", (Part("model.norm.weight", (96,)),))
    with pytest.raises(AssertionError, match=r"declared twice: .*model.norm.weight"):
        load_weights([(weight, print), (weight, print)], open_checkpoint(folder), dtype=torch.float32)


def test_a_layer_that_differs_from_the_table_is_caught(folder):
    model = load(folder)
    model.layers[0].attention.info = model.info.layers[5]
    with pytest.raises(AssertionError, match="sliding_attention"):
        model.check_layers()
