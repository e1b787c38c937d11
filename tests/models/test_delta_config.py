"""Configs of families with delta nets or lightning attention: published ones, and both ways of writing them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import transformers as hf

from hybrid_engine.cli import main
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.registry import describe_model

FULL, DELTA, LIGHTNING = "full_attention", "delta_net", "lightning"
BLOCK, BFLOAT16, FLOAT32 = 16, 2, 4


@dataclass(frozen=True)
class Published:
    """A checkpoint's config, as far as it matters here, and what follows from it by hand."""

    config: dict[str, Any]
    billions: int
    """Parameters, as its name or its report says."""
    full_layers: tuple[int, ...]
    token_bytes: int
    """Of one token in one layer of attention."""
    state_bytes: int
    """Of one state in one recurrent layer."""
    kind: str = DELTA
    """Of the recurrent layers."""


KIMI_FULL = [4, 8, 12, 16, 20, 24, 27]
PUBLISHED = {
    "Qwen3-Next-80B-A3B-Instruct": Published(
        {
            "model_type": "qwen3_next",
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_hidden_layers": 48,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 262_144,
            "full_attention_interval": 4,
            "partial_rotary_factor": 0.25,
            "rope_theta": 10_000_000,
            "rope_scaling": None,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "tie_word_embeddings": False,
        },
        billions=80,
        full_layers=tuple(range(3, 48, 4)),
        token_bytes=2 * 2 * 256 * BFLOAT16,
        state_bytes=(2 * 16 * 128 + 32 * 128) * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32,
    ),
    "Qwen3.5-9B": Published(  # all of it as transformers' class has it
        {"model_type": "qwen3_5_text"},
        billions=9,
        full_layers=tuple(range(3, 32, 4)),
        token_bytes=2 * 4 * 256 * BFLOAT16,
        state_bytes=(2 * 16 * 128 + 32 * 128) * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32,
    ),
    "Qwen3.5-35B-A3B": Published(  # likewise
        {"model_type": "qwen3_5_moe_text"},
        billions=35,
        full_layers=tuple(range(3, 40, 4)),
        token_bytes=2 * 2 * 256 * BFLOAT16,
        state_bytes=(2 * 16 * 128 + 32 * 128) * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32,
    ),
    "Olmo-Hybrid-7B": Published(  # likewise
        {"model_type": "olmo_hybrid", "rope_parameters": {"rope_theta": None}},
        billions=7,
        full_layers=tuple(range(3, 32, 4)),
        token_bytes=2 * 30 * 128 * BFLOAT16,
        state_bytes=(2 * 30 * 96 + 30 * 192) * 3 * BFLOAT16 + 30 * 96 * 192 * FLOAT32,
    ),
    "Kimi-Linear-48B-A3B-Instruct": Published(
        {
            "model_type": "kimi_linear",
            "vocab_size": 163_840,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 27,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "model_max_length": 1_048_576,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "mla_use_nope": True,
            "rope_theta": 10_000.0,
            "linear_attn_config": {
                "full_attn_layers": KIMI_FULL,
                "kda_layers": [number for number in range(1, 28) if number not in KIMI_FULL],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
            "num_experts": 256,
            "num_experts_per_token": 8,
            "num_shared_experts": 1,
            "moe_intermediate_size": 1024,
            "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid",
            "num_expert_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.446,
            "first_k_dense_replace": 1,
            "tie_word_embeddings": False,
        },
        billions=49,
        full_layers=tuple(number - 1 for number in KIMI_FULL),
        token_bytes=(512 + 64) * BFLOAT16,  # the latent, and what the heads share
        state_bytes=3 * 32 * 128 * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32,
    ),
    "MiniMax-Text-01": Published(
        {
            "model_type": "minimax",
            "vocab_size": 200_064,
            "hidden_size": 6144,
            "intermediate_size": 9216,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rotary_dim": 64,
            "layer_types": [FULL if index % 8 == 7 else "linear_attention" for index in range(80)],
            "num_local_experts": 32,
            "num_experts_per_tok": 2,
            "tie_word_embeddings": False,
        },
        billions=456,
        full_layers=tuple(range(7, 80, 8)),
        token_bytes=2 * 8 * 128 * BFLOAT16,
        state_bytes=64 * 128 * 128 * FLOAT32,
        kind=LIGHTNING,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_groups_and_bytes_of_a_published_checkpoint_are_those_worked_out_by_hand(name):
    published = PUBLISHED[name]
    info = describe_model(published.config)
    assert round(info.num_parameters / 1e9) == published.billions
    assert tuple(layer.index for layer in info.layers if layer.kind == FULL) == published.full_layers
    full, states = sorted(
        group_layers(info.cache_specs(block_size=BLOCK, element_bytes=BFLOAT16)), key=lambda group: group.spec.kind
    )
    num_full = len(published.full_layers)
    assert (full.spec.kind, full.layer_indices) == ("full_attention", published.full_layers)
    assert full.block_bytes == num_full * BLOCK * published.token_bytes
    assert states.block_bytes == (len(info.layers) - num_full) * published.state_bytes


@pytest.mark.parametrize("name", PUBLISHED)
def test_plan_shows_what_a_published_checkpoint_keeps(name, capsys, tmp_path):
    published = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "config.json"), "--memory", "16GiB", "--max-model-len", "4096"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    num_full = len(published.full_layers)
    num_layers = len(describe_model(published.config).layers)
    assert f"a token that all layers keep takes {num_full * published.token_bytes:,} bytes" in out
    assert f"a state of all recurrent layers {(num_layers - num_full) * published.state_bytes:,};" in out
    assert published.kind in out


@pytest.mark.parametrize(
    ("config_class", "changes", "recurrent"),
    [
        (hf.Qwen3NextConfig, {"full_attention_interval": 3}, DELTA),
        (hf.Qwen3_5TextConfig, {"full_attention_interval": 2}, DELTA),
        (hf.Qwen3_5MoeTextConfig, {}, DELTA),
        (hf.OlmoHybridConfig, {}, DELTA),
        (hf.OlmoHybridConfig, {"num_hidden_layers": 2}, DELTA),
        (hf.KimiLinearConfig, {}, DELTA),
        (
            hf.KimiLinearConfig,
            {"linear_attn_config": {"full_attn_layers": [2, 7], "kda_layers": [1, 3, 4, 5, 6]}},
            DELTA,
        ),
        (hf.MiniMaxConfig, {}, LIGHTNING),
    ],
    ids=["next", "3.5", "3.5 moe", "olmo", "olmo, short", "kimi", "kimi, as published", "minimax"],
)
def test_kinds_are_those_of_transformers(config_class, changes, recurrent):
    changes = {"num_hidden_layers": 7} | changes
    theirs = config_class(**changes).layer_types
    ours = [layer.kind for layer in describe_model({"model_type": config_class.model_type} | changes).layers]
    assert [recurrent if kind == "linear_attention" else kind for kind in theirs] == ours


@pytest.mark.parametrize("dense", [0, 1, 3])
def test_the_first_mlps_of_kimi_are_dense(dense):
    layers = describe_model(
        {"model_type": "kimi_linear", "num_hidden_layers": 4, "first_k_dense_replace": dense}
    ).layers
    assert [layer.num_experts for layer in layers] == [0] * dense + [256] * (4 - dense)


@pytest.mark.parametrize(
    ("rope", "num_turning"),
    [(None, 128), ({"rope_theta": 500.0}, 128), ({"rope_theta": None, "rope_type": "default"}, 0)],
    ids=["unsaid", "given", "none"],
)
def test_olmo_turns_unless_its_config_says_that_there_is_no_base(rope, num_turning):
    layers = describe_model({"model_type": "olmo_hybrid", "num_hidden_layers": 4, "rope_parameters": rope}).layers
    assert layers[3].rope.rotary_size == num_turning


@pytest.mark.parametrize(("given", "num_turning"), [({}, 128), ({"rotary_dim": 64}, 64)], ids=["all", "rotary_dim"])
def test_minimax_turns_as_much_of_a_head_as_rotary_dim_says(given, num_turning):
    layers = describe_model({"model_type": "minimax", "num_hidden_layers": 1} | given).layers
    assert layers[0].rope.rotary_size == num_turning
