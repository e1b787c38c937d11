"""What published checkpoints keep, from facts of their configs: groups and bytes worked out by hand, in bfloat16."""

from __future__ import annotations

import json

import pytest

from hybrid_engine.cli import main
from hybrid_engine.groups.spec import group_layers
from hybrid_engine.models.published import config_of
from hybrid_engine.models.registry import describe_model

NEMOTRON_NANO_9B_V2 = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-",
    "num_hidden_layers": 56,
    "hidden_size": 4480,
    "intermediate_size": 15_680,
    "num_attention_heads": 40,
    "mamba_num_heads": 128,
    "mamba_head_dim": 80,
}
NEMOTRON_3_NANO_30B = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_hidden_layers": 52,
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}
FULL, STATE = "full_attention", "mamba"


def tokens(num_layers: int, num_kv_heads: int, head_size: int) -> tuple[str, int, int]:
    """16 tokens of attention layers: a key and a value of each kv head, two bytes an element."""
    return FULL, num_layers, num_layers * 16 * 2 * num_kv_heads * head_size * 2


def states(num_layers: int, conv_elements: int, ssm_elements: int) -> tuple[str, int, int]:
    """A state of recurrent layers: what the convolution saw in two bytes each, the recurrent part in four."""
    return STATE, num_layers, num_layers * (2 * conv_elements + 4 * ssm_elements)


# Parameters, where the publisher's own count was at hand, tell that the facts above are right.
PUBLISHED = {
    "Falcon-H1-0.5B": (
        config_of("falcon_h1"),
        521_411_104,
        [tokens(36, 2, 64), states(36, (1536 + 2 * 128) * 3, 24 * 64 * 128)],
    ),
    "Nemotron-H-8B": (
        config_of("nemotron_h"),
        8_100_852_736,
        [states(24, (8192 + 2 * 8 * 128) * 3, 128 * 64 * 128), tokens(4, 8, 128)],
    ),
    "Nemotron-Nano-9B-v2": (
        NEMOTRON_NANO_9B_V2,
        8_888_227_328,
        [states(27, (10_240 + 2 * 8 * 128) * 3, 128 * 80 * 128), tokens(4, 8, 128)],
    ),
    "Nemotron-3-Nano-30B-A3B": (
        NEMOTRON_3_NANO_30B,
        31_577_940_288,
        [states(23, (4096 + 2 * 8 * 128) * 3, 64 * 64 * 128), tokens(6, 2, 128)],
    ),
    "Zamba2-1.2B": (
        config_of("zamba2"),
        1_215_064_704,
        [states(38, (4096 + 2 * 128) * 3, 64 * 64 * 128), tokens(6, 32, 128)],
    ),
    "Zamba-7B-v1": (config_of("zamba"), 7_232_490_496, [states(76, 7424 * 3, 7424 * 16), tokens(13, 16, 464)]),
    "RecurrentGemma-2B": (
        config_of("recurrent_gemma"),
        2_682_862_080,
        [states(18, 2560 * 3, 2560), ("sliding_window", *tokens(8, 1, 256)[1:])],
    ),
    "falcon-mamba-7b": (config_of("falcon_mamba"), 7_272_665_088, [states(64, 8192 * 3, 8192 * 16)]),
    "LFM2-8B-A1B": (config_of("lfm2_moe"), 8_339_930_560, [states(18, 2048 * 2, 0), tokens(6, 8, 64)]),
}
every_model = pytest.mark.parametrize("name", PUBLISHED)


@every_model
def test_groups_and_bytes_are_those_of_a_calculation_by_hand(name):
    config, _, expected = PUBLISHED[name]
    groups = group_layers(describe_model(config).cache_specs(block_size=16, element_bytes=2))
    found = [(group.spec.kind, len(group.layer_indices), group.block_bytes) for group in groups]
    assert found == expected


@every_model
def test_the_layers_have_as_many_parameters_as_the_checkpoint(name):
    config, num_parameters, _ = PUBLISHED[name]
    assert describe_model(config).num_parameters == num_parameters


@every_model
def test_plan_shows_layers_and_groups_of_the_config_alone(name, tmp_path, capsys):
    config, _, expected = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(config | {"torch_dtype": "bfloat16"}))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "config.json"), "--memory", "4GiB"])
    out = capsys.readouterr().out
    assert ended.value.code in (None, 0)
    info = describe_model(config)
    assert f"{info.num_layers} layers" in " ".join(out.split())
    for _, num_layers, block_bytes in expected:
        assert f" {num_layers}: " in out
        assert f" {block_bytes:,} " in out
