"""Configs of hybrids with states that don't fit their checkpoints: each is refused by name.

What is wrong with tensors is said by name for all families in tests/models/test_families_loading.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import state_families
import torch
from safetensors.torch import load_file, save_file

from hybrid_engine.errors import CheckpointError, ConfigError
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

each_model = pytest.mark.parametrize("name", state_families.FAMILIES)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a function that gives the config and the tensors of a tiny model as transformers saves it."""
    made = {}

    def load(name: str) -> tuple[dict, dict[str, torch.Tensor]]:
        if name not in made:
            folder = tmp_path_factory.mktemp("saved")
            model_class, config = state_families.FAMILIES[name]()
            torch.manual_seed(0)
            model_class(config).save_pretrained(folder)
            made[name] = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
        config, tensors = made[name]
        return dict(config), dict(tensors)

    return load


def load(folder: Path, config: dict, tensors: dict[str, torch.Tensor]):
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return load_model(open_checkpoint(folder), dtype=torch.float32)


@each_model
def test_a_wrong_tie_flag_is_refused(name, saved, tmp_path):
    config, tensors = saved(name)
    config["tie_word_embeddings"] = is_tied = "lm_head.weight" in tensors
    with pytest.raises(CheckpointError, match="differs from the embedding" if is_tied else "lacks lm_head.weight"):
        load(tmp_path, config, tensors)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("falcon_h1", {"layer_types": ["full_attention"] * 3}, "layer_types must be 'hybrid' for each of the 3 layers"),
        (
            "falcon_h1",
            {"mamba_n_heads": 3},
            "mamba_n_heads is 3 and mamba_d_head 10: their product must be mamba_d_ssm",
        ),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, "ssm_multipliers = .*, must be a list of 5"),
        ("falcon_h1", {"mlp_multipliers": 1.0}, "mlp_multipliers = 1.0, must be a list of 2"),
        ("falcon_h1", {"mamba_d_ssm": 80, "mamba_d_head": 20}, "has shape .*, its config implies"),
        ("falcon_h1", {"mamba_rms_norm": True}, "lacks model.layers.0.mamba.norm.weight"),
        ("falcon_h1", {"mamba_n_groups": 3}, "4 Mamba-2 heads can't share 3 groups"),
        ("nemotron_h", {"layers_block_type": "absent"}, "neither layers_block_type nor hybrid_override_pattern"),
        (
            "nemotron_h",
            {"layers_block_type": ["mamba", "conv"]},
            "the pattern of layers holds conv; known here: linear_",
        ),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M|"},
            r"holds \|; known here: M, \*, -, E",
        ),
        ("nemotron_h", {"num_hidden_layers": 6}, "the pattern has 7 layers, num_hidden_layers is 6"),
        ("nemotron_h", {"layers_block_type": ["mlp"] * 7}, "lacks backbone.layers.1.mixer.down_proj"),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, "mlp_hidden_act is 'silu', must be 'relu2'"),
        ("nemotron_h", {"use_bias": False}, "nothing reads: backbone.layers.1.mixer.in_proj.bias"),
        ("nemotron_h with experts", {"n_group": 4}, "n_group must divide the 6 experts"),
        ("nemotron_h with experts", {"num_experts_per_tok": 7}, r"at most the number of experts \(6\)"),
        ("nemotron_h with experts", {"moe_latent_size": 16}, "lacks backbone.layers.2.mixer.fc1_latent_proj.weight"),
        ("zamba2", {"layers_block_type": "absent"}, "layers_block_type is missing, must say of each of the 6 layers"),
        ("zamba2", {"layers_block_type": ["hybrid", "moe"] * 3}, "holds moe; known here: hybrid, mamba"),
        ("zamba2", {"layers_block_type": ["hybrid"]}, "has 1 entries, must have one for each of the 6 layers"),
        ("zamba2", {"layers_block_type": ["hybrid"] + ["mamba"] * 5}, "lacks model.layers.0.linear.weight"),
        ("zamba2", {"num_mem_blocks": 1}, "lacks model.layers.1.shared_transformer.feed_forward.gate_up_proj_adapter_"),
        ("zamba2", {"num_mem_blocks": 3}, "lacks model.layers.4.shared_transformer.feed_forward.down_proj.weight"),
        ("zamba2", {"use_shared_attention_adapter": False}, "nothing reads: .*linear_k_adapter_list"),
        ("zamba2", {"num_key_value_heads": 2}, r"must be num_attention_heads \(6\) where the attention has adapters"),
        ("zamba2", {"use_long_context": True}, "use_long_context is true, which rescales the rope"),
        ("zamba2", {"n_mamba_heads": 7}, r"n_mamba_heads is 7, must divide mamba_expand \* hidden_size \(96\)"),
        (
            "lfm2_moe",
            {"layer_types": "absent"},
            "layer_types is missing, must list each layer as",
        ),
        ("lfm2_moe", {"layer_types": ["conv"] * 4}, "lacks model.layers.1.conv.conv.bias"),
        ("lfm2_moe", {"num_dense_layers": 2}, "lacks model.layers.1.feed_forward.w1.weight"),
        ("lfm2_moe", {"use_expert_bias": False}, "nothing reads: model.layers.1.feed_forward.expert_bias"),
        ("lfm2_moe", {"num_experts": 5}, r"shape \[6, 48\], its config implies \[5, 48\]|nothing reads"),
        ("zamba", {"layers_block_type": ["mamba"] * 7}, "lacks model.layers.2.input_layernorm.weight"),
        ("zamba", {"layers_block_type": None, "attn_layer_period": 2}, "lacks model.layers.6.linear.weight"),
        ("zamba", {"attn_layer_offset": 3}, r"attn_layer_offset is 3, must be a whole number below"),
        ("zamba", {"n_mamba_heads": 5}, r"n_mamba_heads is 5, must divide mamba_expand \* hidden_size \(96\)"),
        ("zamba", {"n_mamba_heads": 2}, r"x_proj_weight has shape \[3, 17, 32\], its config implies \[2, 17, 48\]"),
        ("zamba", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act is 'gelu', must be 'silu'"),
        ("zamba", {"attention_head_dim": 8}, r"attention_head_dim is 8, must follow .* \(16\)"),
        ("recurrent_gemma", {"block_types": []}, r"block_types is \[\], must be a list of recurrent and attention"),
        ("recurrent_gemma", {"block_types": ["conv"]}, "must be a list of recurrent and attention"),
        ("recurrent_gemma", {"block_types": ["attention"]}, "lacks model.layers.0.temporal_block.k_proj.weight"),
        ("recurrent_gemma", {"lru_width": 50}, r"lru_width is 50, must be a multiple of num_attention_heads \(3\)"),
        ("recurrent_gemma", {"conv1d_width": 1}, "conv1d_width is 1, must be at least 2"),
        ("recurrent_gemma", {"hidden_activation": "silu"}, "hidden_activation is 'silu', must be 'gelu_pytorch_tanh'"),
        ("recurrent_gemma", {"attention_bias": True}, "lacks model.layers.1.temporal_block.k_proj.bias"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_config_that_does_not_fit_is_refused(name, change, message, saved, tmp_path):
    config, tensors = saved(name)
    with pytest.raises((CheckpointError, ConfigError), match=message):
        load(tmp_path, {key: value for key, value in (config | change).items() if value != "absent"}, tensors)
