"""GGUF files: what llama.cpp's converter does to names and values is undone, and broken files are refused."""

from __future__ import annotations

import struct

import gguf
import pytest
import torch

from hybrid_engine.errors import CheckpointError, UnknownModelError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import open_checkpoint

Q = gguf.GGMLQuantizationType
QUERY = "blk.0.attn_q.weight"


def assert_equal_tensors(checkpoint, model, *, atol: float) -> None:
    state = {name: tensor for name, tensor in model.state_dict().items() if name in set(checkpoint.names())}
    for name, tensor in state.items():
        torch.testing.assert_close(checkpoint.tensor(name), tensor, rtol=0, atol=atol)


def test_gemma_has_hugging_faces_names_and_values(gemma_gguf, gemma):
    checkpoint = open_checkpoint(gemma_gguf)
    assert set(checkpoint.names()) == gemma.state_dict().keys() - {"lm_head.weight"}
    assert_equal_tensors(checkpoint, gemma, atol=1e-6)  # norms come back from 1 + weight, rounded once


def test_llama_has_its_heads_rows_in_order_again(llama_gguf, llama):
    checkpoint = open_checkpoint(llama_gguf)
    assert set(checkpoint.names()) == llama.state_dict().keys()
    assert_equal_tensors(checkpoint, llama, atol=0)


@pytest.mark.parametrize("architecture", ["gemma", "llama"])
def test_logits_from_a_gguf_file_equal_transformers(architecture, request, paged_run_logits):
    theirs = request.getfixturevalue(architecture)
    ours = load_model(open_checkpoint(request.getfixturevalue(f"{architecture}_gguf")), dtype=torch.float32)
    tokens = list(range(3, 33))
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(paged_run_logits(ours, tokens), expected_TV, rtol=0, atol=1e-4)


def test_the_layer_table_of_gemma_comes_from_the_metadata(gemma_gguf, gemma):
    checkpoint = open_checkpoint(gemma_gguf)
    info = describe_model(checkpoint.config)
    assert info.layers == describe_model(gemma.config.to_dict()).layers
    assert info.layers[0].window == 8
    assert (info.eos_token_ids, info.bos_token_id) == ((1, 6), 2)


def test_local_theta_pattern_and_scaling_are_taken_when_a_file_has_them(
    gemma_tensors, gguf_writer, gguf_metadata, tmp_path
):
    more = {
        "rope.freq_base_swa": 500.0,
        "rope.scaling.type": "linear",
        "rope.scaling.factor": 4.0,
        "attention.sliding_window_pattern": [True, False],
    }
    path = gguf_writer(tmp_path / "x.gguf", "gemma3", gemma_tensors, gguf_metadata | more)
    local, wide, *_ = describe_model(open_checkpoint(path).config).layers
    assert (local.kind, local.rope_theta, local.rope_scaling) == ("sliding_attention", 500.0, "default")
    assert (wide.kind, wide.rope_theta, wide.rope_scaling) == ("full_attention", 1e6, "linear x4")


@pytest.mark.parametrize(
    ("architecture", "num_layers", "scalar"),
    [("gemma3", 62, 24), ("gemma3", 7, 32), ("gemma2", 46, 24)],
    ids=["gemma 3 27B", "gemma 3", "gemma 2 27B"],
)
def test_the_query_scale_of_the_27b_is_known_by_its_layers(
    architecture, num_layers, scalar, gguf_writer, gguf_metadata, tmp_path
):
    metadata = gguf_metadata | {"block_count": num_layers}
    path = gguf_writer(tmp_path / "x.gguf", architecture, {"token_embd.weight": torch.zeros(64, 96)}, metadata)
    assert open_checkpoint(path).config["query_pre_attn_scalar"] == scalar


def test_gemma2_caps_scores_and_logits(gguf_writer, gguf_metadata, tmp_path):
    metadata = gguf_metadata | {"attn_logit_softcapping": 40.0}
    path = gguf_writer(tmp_path / "x.gguf", "gemma2", {"token_embd.weight": torch.zeros(64, 96)}, metadata)
    config = open_checkpoint(path).config
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (40.0, 30.0)


def test_llama3s_frequency_divisors_become_the_rope_scaling(llama_tensors, gguf_writer, gguf_metadata, tmp_path):
    divisors = torch.linspace(1, 8, 16)
    metadata = gguf_metadata | {"block_count": 2, "rope.dimension_count": 32}
    path = gguf_writer(tmp_path / "x.gguf", "llama", llama_tensors | {"rope_freqs.weight": divisors}, metadata)
    model = load_model(open_checkpoint(path), dtype=torch.float32)
    assert model.info.layers[0].rope.divisors == tuple(divisors.tolist())


@pytest.mark.parametrize("scaling", [{}, {"rope.scaling.type": "none"}], ids=["absent", "none"])
def test_no_scaling_is_the_default_rope(scaling, llama_tensors, gguf_writer, gguf_metadata, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "llama", llama_tensors, gguf_metadata | scaling | {"block_count": 2})
    assert describe_model(open_checkpoint(path).config).layers[0].rope_scaling == "default"


def test_yarn_scaling_is_read_with_its_context(llama_tensors, gguf_writer, gguf_metadata, tmp_path):
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.25,
    }
    path = gguf_writer(tmp_path / "x.gguf", "llama", llama_tensors, gguf_metadata | yarn | {"block_count": 2})
    rope = describe_model(open_checkpoint(path).config).layers[0].rope
    assert (rope.scaling, rope.factor, rope.original_max_position_embeddings, rope.magnitude) == ("yarn", 4.0, 64, 1.25)


@pytest.mark.parametrize("kind", [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0], ids=lambda kind: kind.name)
def test_quantised_tensors_are_what_the_gguf_package_makes_of_them(
    kind, llama_tensors, gguf_writer, gguf_metadata, tmp_path, monkeypatch
):
    monkeypatch.setattr("hybrid_engine.weights.gguf_file.SLICE_ELEMENTS", 96 * 5)  # slices of 5 rows, and a rest
    name = "blk.1.ffn_up.weight"
    path = gguf_writer(tmp_path / "x.gguf", "llama", llama_tensors, gguf_metadata | {"block_count": 2}, {name: kind})
    stored = next(tensor for tensor in gguf.GGUFReader(path).tensors if tensor.name == name)
    expected = torch.tensor(gguf.quants.dequantize(stored.data, stored.tensor_type))
    assert torch.equal(open_checkpoint(path).tensor("model.layers.1.mlp.up_proj.weight"), expected)


def test_a_type_that_the_gguf_package_cannot_dequantise_is_named(gguf_writer, gguf_metadata, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "llama", {"token_embd.weight": torch.zeros(64, 96)}, gguf_metadata)
    content = path.read_bytes()
    entry = b"token_embd.weight" + struct.pack("<IQQI", 2, 96, 64, int(Q.F32))
    assert entry in content
    path.write_bytes(content.replace(entry, entry[:-4] + struct.pack("<I", int(Q.I8))))
    with pytest.raises(CheckpointError, match=r"token_embd.weight is I8, which gguf can't read"):
        open_checkpoint(path).tensor("model.embed_tokens.weight")


def test_a_type_that_nobody_knows_is_named(gguf_writer, gguf_metadata, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "llama", {"token_embd.weight": torch.zeros(64, 96)}, gguf_metadata)
    entry = b"token_embd.weight" + struct.pack("<IQQI", 2, 96, 64, int(Q.F32))
    path.write_bytes(path.read_bytes().replace(entry, entry[:-4] + struct.pack("<I", 999)))
    with pytest.raises(CheckpointError, match=r"token_embd.weight has type 999"):
        open_checkpoint(path)


@pytest.mark.parametrize("share", [0.999, 0.5, 0.0005], ids=["in the last tensor", "half", "in the header"])
def test_a_file_cut_short_is_refused(share, gemma_gguf):
    content = gemma_gguf.read_bytes()
    gemma_gguf.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CheckpointError, match="is cut short"):
        open_checkpoint(gemma_gguf)


def test_a_file_of_a_few_bytes_is_refused(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is no GGUF file: 4 bytes"):
        open_checkpoint(tmp_path / "x.gguf")


@pytest.mark.parametrize("start", [b"GGML\x03\0\0\0", b"GGUF\x01\0\0\0"], ids=["other magic", "old version"])
def test_another_format_or_version_is_refused(start, gemma_gguf):
    gemma_gguf.write_bytes(start + gemma_gguf.read_bytes()[8:])
    with pytest.raises(CheckpointError, match="is no GGUF file of version 2 or 3"):
        open_checkpoint(gemma_gguf)


def test_a_value_of_an_undefined_type_is_refused(gguf_writer, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "llama", {}, {})
    entry = b"general.architecture" + struct.pack("<I", 8)
    path.write_bytes(path.read_bytes().replace(entry, entry[:-4] + struct.pack("<I", 77)))
    with pytest.raises(CheckpointError, match="a value of type 77, which GGUF doesn't define"):
        open_checkpoint(path)


def test_one_part_of_a_split_file_is_refused(gguf_writer, gguf_metadata, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "llama", {}, gguf_metadata | {"split.count": 3})
    with pytest.raises(CheckpointError, match="is one of 3 parts: merge them"):
        open_checkpoint(path)


def test_a_foreign_architecture_names_those_that_are_read(gguf_writer, tmp_path):
    path = gguf_writer(tmp_path / "x.gguf", "rwkv7", {}, {})
    with pytest.raises(UnknownModelError, match="architecture 'rwkv7'; GGUF files read here: gemma2, gemma3, llama"):
        open_checkpoint(path)


def test_a_foreign_tensor_is_not_ignored(llama_tensors, gguf_writer, gguf_metadata, tmp_path):
    tensors = llama_tensors | {"blk.0.attn_sinks.weight": torch.zeros(4)}
    path = gguf_writer(tmp_path / "x.gguf", "llama", tensors, gguf_metadata | {"block_count": 2})
    with pytest.raises(CheckpointError, match=r"nothing reads: blk.0.attn_sinks.weight"):
        load_model(open_checkpoint(path), dtype=torch.float32)


def test_a_folder_with_one_file_is_that_file(gemma_gguf):
    assert open_checkpoint(gemma_gguf.parent).path == gemma_gguf


def test_a_folder_with_two_files_asks_which(gemma_gguf, llama_gguf):
    with pytest.raises(CheckpointError, match=r"holds 2 .gguf files \(gemma.gguf, llama.gguf\)"):
        open_checkpoint(gemma_gguf.parent)
