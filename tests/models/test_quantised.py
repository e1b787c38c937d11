"""Quantised safetensors: MXFP4 as GPT-OSS is released, fp8 in tiles; against transformers' own reading of the bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers as hf
from attention_families import COMMON, FAMILIES
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from hybrid_engine.errors import CheckpointError, ConfigError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import open_checkpoint
from hybrid_engine.weights.dequantised import dequantised

EXPERTS = "model.layers.0.mlp.experts.gate_up_proj"
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def rewrite(folder: Path, tensors: dict[str, torch.Tensor], **config) -> None:
    """Save other tensors, and a config with other fields."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | config))


def random_mxfp4(num_experts: int, num_rows: int, num_columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks and scales at random, the scales around 1/8."""
    blocks = torch.randint(0, 256, (num_experts, num_rows, num_columns // 32, 16), dtype=torch.uint8)
    return blocks, torch.randint(122, 126, blocks.shape[:-1], dtype=torch.uint8)


@pytest.fixture
def gpt_oss(tmp_path, save_tiny):
    """A GPT-OSS whose experts are MXFP4: its folder, and transformers' model with the same weights in float32."""
    config = hf.GptOssConfig(
        **COMMON | {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1},
        head_dim=16,
        num_local_experts=3,
        num_experts_per_tok=2,
    )
    save_tiny(hf.GptOssForCausalLM, config, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    plain = dict(tensors)
    for name, rows, columns in ((EXPERTS, 64, 64), (EXPERTS.replace("gate_up", "down"), 64, 32)):
        blocks, scales = random_mxfp4(3, rows, columns)
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        plain[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    theirs = hf.GptOssForCausalLM(config).eval()
    theirs.load_state_dict(plain)
    rewrite(tmp_path, tensors, quantization_config=MXFP4)
    return tmp_path, theirs


def test_experts_in_mxfp4_give_the_logits_of_transformers(gpt_oss, paged_run):
    folder, theirs = gpt_oss
    tokens = list(range(48))
    logits_TV = paged_run(load_model(open_checkpoint(folder), dtype=torch.float32)).step({0: tokens})[0]
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=1e-3 * expected_TV.std().item())


def test_mxfp4_loses_nothing_in_bfloat16(gpt_oss):
    checkpoint = dequantised(open_checkpoint(gpt_oss[0]))
    exact, rounded = (checkpoint.tensor(EXPERTS, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    assert torch.equal(exact, rounded.float())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{EXPERTS}_scales"), "lacks '.*gate_up_proj_scales', without which"),
        (lambda t: t.pop(f"{EXPERTS}_blocks"), "lacks .*gate_up_proj"),
        (lambda t: t.update({f"{EXPERTS}_scales": t[f"{EXPERTS}_scales"][..., :1]}), "with one scale a block"),
        (lambda t: t.update({f"{EXPERTS}_blocks": t[f"{EXPERTS}_blocks"][:, :-1]}), r"has shape \[3, 64, 63\], its"),
        (lambda t: t.update({f"{EXPERTS}_blocks": t[f"{EXPERTS}_blocks"][0]}), "must have four dimensions"),
    ],
    ids=["no scales", "no blocks", "too few scales", "too few rows", "no stack"],
)
def test_damaged_mxfp4_is_refused_by_name(gpt_oss, change, message):
    folder, _ = gpt_oss
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    rewrite(folder, tensors)
    with pytest.raises(CheckpointError, match=message):
        load_model(open_checkpoint(folder), dtype=torch.float32)


@pytest.fixture
def fp8(tmp_path, save_tiny):
    """A Phi 3 in fp8, tiles of 16 x 32 that don't divide its matrices: its folder, and what the bytes stand for."""
    save_tiny(*FAMILIES["phi3"](), tmp_path)
    tensors, plain = load_file(tmp_path / "model.safetensors"), {}
    for name, matrix in list(tensors.items()):
        plain[name] = matrix
        if name.endswith("_proj.weight"):
            rows, columns = matrix.shape
            scales = torch.rand(-(-rows // 16), -(-columns // 32)) + 0.5
            wide = scales.repeat_interleave(16, 0)[:rows].repeat_interleave(32, 1)[:, :columns]
            tensors[name] = (matrix / wide).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scales
            plain[name] = tensors[name].float() * wide
    rewrite(tmp_path, tensors, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 32]})
    return tmp_path, plain


def test_fp8_in_tiles_is_read_with_its_factors(fp8):
    folder, plain = fp8
    checkpoint = dequantised(open_checkpoint(folder))
    assert set(checkpoint.names()) == plain.keys()
    for name, matrix in plain.items():
        torch.testing.assert_close(checkpoint.tensor(name, dtype=torch.float32), matrix, rtol=1e-6, atol=0)
    load_model(open_checkpoint(folder), dtype=torch.float32)


def test_factors_of_other_tiles_are_refused(fp8):
    folder, _ = fp8
    tensors = load_file(folder / "model.safetensors")
    rewrite(folder, tensors, quantization_config={"quant_method": "fp8", "weight_block_size": [16, 16]})
    with pytest.raises(CheckpointError, match=r"_scale_inv has shape .* in tiles of 16 x 16 implies"):
        load_model(open_checkpoint(folder), dtype=torch.float32)


def test_another_way_of_quantising_is_refused_with_those_that_are_read():
    with pytest.raises(ConfigError, match=r"quantization_config \(gptq\): .* mxfp4, fp8 are read"):
        describe_model({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
