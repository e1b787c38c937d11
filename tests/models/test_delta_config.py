"""Configs of families with delta nets or lightning attention: published ones, and both ways of writing them."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest
import transformers as hf

from hybrid_engine.cli import main
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.published import config_of
from hybrid_engine.models.registry import describe_model

FULL, DELTA, LIGHTNING = "full_attention", "delta_net", "lightning"
BLOCK, BFLOAT16, FLOAT32 = 16, 2, 4


@dataclass(frozen=True)
class ByHand:
    """What follows from a published config, in bfloat16."""

    billions: int
    """Parameters, as the checkpoint's name or its report says: they tell that the config is its."""
    full_layers: tuple[int, ...]
    token_bytes: int
    """Of one token in one layer of attention."""
    state_bytes: int
    """Of one state in one recurrent layer."""
    kind: str = DELTA
    """Of the recurrent layers."""


QWEN_STATE = (2 * 16 * 128 + 32 * 128) * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32
PUBLISHED = {
    "qwen3_next": ByHand(80, tuple(range(3, 48, 4)), 2 * 2 * 256 * BFLOAT16, QWEN_STATE),
    "qwen3_5_text": ByHand(9, tuple(range(3, 32, 4)), 2 * 4 * 256 * BFLOAT16, QWEN_STATE),
    "qwen3_5_moe_text": ByHand(35, tuple(range(3, 40, 4)), 2 * 2 * 256 * BFLOAT16, QWEN_STATE),
    "olmo_hybrid": ByHand(
        7,
        tuple(range(3, 32, 4)),
        2 * 30 * 128 * BFLOAT16,
        (2 * 30 * 96 + 30 * 192) * 3 * BFLOAT16 + 30 * 96 * 192 * FLOAT32,
    ),
    "kimi_linear": ByHand(
        49,
        (3, 7, 11, 15, 19, 23, 26),
        (512 + 64) * BFLOAT16,  # the latent, and what the heads share
        3 * 32 * 128 * 3 * BFLOAT16 + 32 * 128 * 128 * FLOAT32,
    ),
    "minimax": ByHand(
        456,
        tuple(range(7, 80, 8)),
        2 * 8 * 128 * BFLOAT16,
        64 * 128 * 128 * FLOAT32,
        kind=LIGHTNING,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_groups_and_bytes_of_a_published_checkpoint_are_those_worked_out_by_hand(name):
    published = PUBLISHED[name]
    info = describe_model(config_of(name))
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
    (tmp_path / "config.json").write_text(json.dumps(config_of(name)))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "config.json"), "--memory", "16GiB", "--max-model-len", "4096"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    num_full = len(published.full_layers)
    num_layers = len(describe_model(config_of(name)).layers)
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
