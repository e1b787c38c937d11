"""Safetensors folders: one file, shards, and the ways in which they can be broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError
from hybrid_engine.weights import open_checkpoint

INDEX = "model.safetensors.index.json"


def edit_json(path: Path, **changes) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_one_file_and_shards_hold_the_same_tensors(gemma, tmp_path):
    gemma.save_pretrained(tmp_path / "one")
    gemma.save_pretrained(tmp_path / "many", max_shard_size="500KB")
    one, many = open_checkpoint(tmp_path / "one"), open_checkpoint(tmp_path / "many")
    assert set(one.names()) == set(many.names())
    assert all(torch.equal(one.tensor(name), many.tensor(name)) for name in one.names())


def test_a_tensor_comes_in_the_wanted_dtype(folder, gemma):
    tensor = open_checkpoint(folder).tensor("model.norm.weight", dtype=torch.bfloat16)
    assert torch.equal(tensor, gemma.model.norm.weight.to(torch.bfloat16))


def test_what_is_read_belongs_to_the_caller(folder):
    checkpoint = open_checkpoint(folder)
    checkpoint.tensor("model.norm.weight").fill_(7)
    assert not (open_checkpoint(folder).tensor("model.norm.weight") == 7).any()


def test_end_tokens_come_from_the_generation_config_first(folder):
    edit_json(folder / "generation_config.json", eos_token_id=[1, 106])
    assert open_checkpoint(folder).config["eos_token_id"] == [1, 106]


def test_a_path_that_is_not_there_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere doesn't exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_file_that_is_no_gguf_is_refused(folder):
    with pytest.raises(CheckpointError, match=r"model.safetensors is no .gguf file"):
        open_checkpoint(folder / "model.safetensors")


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"neither \*.safetensors nor a \*.gguf"):
        open_checkpoint(tmp_path)


def test_a_missing_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json is missing"):
        open_checkpoint(folder)


@pytest.mark.parametrize(("text", "message"), [("{", "is no JSON"), ("[]", "holds a list")], ids=["cut", "a list"])
def test_a_broken_config_is_named(folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=rf"config.json {message}"):
        open_checkpoint(folder)


def test_a_missing_shard_is_named(shards):
    missing, *others = sorted(shards.glob("*.safetensors"))
    missing.unlink()
    with pytest.raises(CheckpointError, match=f"lacks 1 of {len(others) + 1} shards: {missing.name}"):
        open_checkpoint(shards)


@pytest.mark.parametrize("num_bytes", [-1, -50_000, 1], ids=["one byte short", "far too short", "one byte too long"])
def test_a_file_that_is_not_as_long_as_its_header_says_is_refused(folder, num_bytes):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content + b"x" if num_bytes > 0 else content[:num_bytes])
    with pytest.raises(CheckpointError, match=rf"{len(content) + num_bytes} bytes, its header says {len(content)}"):
        open_checkpoint(folder)


@pytest.mark.parametrize("num_bytes", [0, 5, 200], ids=["empty", "no length", "inside the header"])
def test_a_file_that_ends_in_its_header_is_refused(folder, num_bytes):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match="is cut short"):
        open_checkpoint(folder)


def test_a_file_of_another_format_is_refused(folder):
    (folder / "model.safetensors").write_bytes((4).to_bytes(8, "little") + b"oops and more")
    with pytest.raises(CheckpointError, match="is no safetensors file"):
        open_checkpoint(folder)


def test_an_index_that_names_a_tensor_no_shard_has_is_refused(shards):
    weight_map = json.loads((shards / INDEX).read_text())["weight_map"]
    shard = weight_map["model.norm.weight"]
    edit_json(shards / INDEX, weight_map=weight_map | {"model.ghost.weight": shard})
    with pytest.raises(CheckpointError, match=f"{shard} holds 'model.ghost.weight', but"):
        open_checkpoint(shards)


def test_an_index_without_a_map_is_refused(shards):
    (shards / INDEX).write_text("{}")
    with pytest.raises(CheckpointError, match="has no weight_map"):
        open_checkpoint(shards)


def test_several_files_without_an_index_are_refused(shards):
    (shards / INDEX).unlink()
    with pytest.raises(CheckpointError, match=rf"holds \d safetensors files and no {INDEX}"):
        open_checkpoint(shards)


def test_a_tensor_that_is_not_there_is_an_error(folder):
    checkpoint = open_checkpoint(folder)
    with pytest.raises(CheckpointError, match=r"has no tensor 'lm_head.bias'; it has .* and \d+ more"):
        checkpoint.tensor("lm_head.bias")


def test_integers_keep_their_type(folder):
    tensors = load_file(folder / "model.safetensors") | {"count": torch.tensor([3])}
    save_file(tensors, folder / "model.safetensors")
    assert open_checkpoint(folder).tensor("count", dtype=torch.bfloat16).dtype == torch.int64
