"""Configs of hybrids: which layer is what, from the older attributes and from lists."""

from __future__ import annotations

import math

import pytest
from transformers import (
    BambaConfig,
    FalconH1Config,
    FalconMambaConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm2MoeConfig,
    Lfm3Config,
    Mamba2Config,
    MambaConfig,
    MiniMaxConfig,
    NemotronHConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    Zamba2Config,
    ZambaConfig,
)

from hybrid_engine.errors import ConfigError
from hybrid_engine.models import (
    bamba,
    falcon_h1,
    jamba,
    kimi_linear,
    lfm,
    lfm_moe,
    mamba,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen_next,
    recurrent_gemma,
    zamba,
    zamba2,
)
from hybrid_engine.models.bamba import time_step_limit
from hybrid_engine.models.registry import describe_model

FULL, MAMBA, MAMBA2 = "full_attention", "mamba", "mamba2"
SMALL = {"vocab_size": 50, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 7, "num_attention_heads": 3}
SMALL |= {"num_key_value_heads": 1, "mamba_expand": 1, "mamba_n_heads": 4, "mamba_d_state": 8}
PERIODS = {"attn_layer_period": 3, "attn_layer_offset": 2, "expert_layer_period": 4, "expert_layer_offset": 1}
JAMBA = SMALL | {"model_type": "jamba"} | PERIODS
BAMBA = SMALL | {"model_type": "bamba"}
GRANITE = SMALL | {"model_type": "granitemoehybrid"}
LFM = {key: SMALL[key] for key in SMALL if not key.startswith("mamba")} | {"pad_token_id": None}
LFM2, LFM3 = LFM | {"model_type": "lfm2"}, LFM | {"model_type": "lfm3"}
OLD_LIST = [MAMBA, MAMBA, "attention", MAMBA, MAMBA, "attention", MAMBA]
NEW_LIST = [FULL if kind == "attention" else "linear_attention" for kind in OLD_LIST]


def kinds(config: dict) -> list[str]:
    return [layer.kind for layer in describe_model(config).layers]


@pytest.mark.parametrize(
    ("config", "recurrent"),
    [
        (JAMBA, MAMBA),
        (JAMBA | {"attn_layer_offset": 0, "layers_block_type": OLD_LIST}, MAMBA),
        (JAMBA | {"attn_layer_offset": 0, "layer_types": NEW_LIST}, MAMBA),
        (BAMBA | {"attn_layer_indices": [2, 5]}, MAMBA2),
        (BAMBA | {"layers_block_type": OLD_LIST}, MAMBA2),
        (BAMBA | {"layer_types": NEW_LIST}, MAMBA2),
        (GRANITE | {"layer_types": OLD_LIST}, MAMBA2),
        (GRANITE | {"layers_block_type": NEW_LIST}, MAMBA2),
    ],
    ids=[
        "jamba periods",
        "jamba old",
        "jamba new",
        "bamba indices",
        "bamba old",
        "bamba new",
        "granite",
        "granite new",
    ],
)
def test_old_attributes_and_lists_give_the_same_kinds(config, recurrent):
    assert kinds(config) == [FULL if kind == "attention" else recurrent for kind in OLD_LIST]


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (JAMBA, JambaConfig(**PERIODS | {"num_hidden_layers": 7})),
        (BAMBA | {"attn_layer_indices": [0, 6]}, BambaConfig(num_hidden_layers=7, attn_layer_indices=[0, 6])),
        (GRANITE, GraniteMoeHybridConfig(num_hidden_layers=7)),
    ],
    ids=["jamba", "bamba", "granite without a list"],
)
def test_kinds_are_those_of_transformers(config, theirs):
    recurrent = MAMBA if config["model_type"] == "jamba" else MAMBA2
    assert kinds(config) == [recurrent if kind == "linear_attention" else kind for kind in theirs.layer_types]


@pytest.mark.parametrize(
    ("config", "theirs"),
    [
        (LFM2, Lfm2Config(**LFM2)),
        (LFM2 | {"full_attn_idxs": [1, 4]}, Lfm2Config(**LFM2, full_attn_idxs=[1, 4])),
        (LFM3, Lfm3Config(**LFM3)),
    ],
    ids=["lfm2: attention everywhere", "lfm2: indices", "lfm3"],
)
def test_kinds_of_short_convolution_hybrids_are_those_of_transformers(config, theirs):
    assert kinds(config) == theirs.layer_types


def test_an_empty_lfm3_config_has_the_ropes_of_transformers():
    theirs, layers = Lfm3Config().rope_parameters, describe_model({"model_type": "lfm3"}).layers
    ropes = {layer.kind: (layer.rope_theta, layer.rope.num_turning) for layer in layers if layer.recurrent is None}
    assert ropes == {kind: (rope["rope_theta"], ropes[kind][1]) for kind, rope in theirs.items()}
    assert ropes["full_attention"][1] == 128 * theirs["full_attention"]["partial_rotary_factor"]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"intermediate_size": 100, "block_multiple_of": 7},
        {"intermediate_size": 100, "block_ffn_dim_multiplier": 1.3, "block_multiple_of": 7},
        {"intermediate_size": 100, "block_auto_adjust_ff_dim": False},
        {"block_ff_dim": 90, "tie_embedding": False},
    ],
    ids=["default", "multiple", "multiplier", "not adjusted", "old keys"],
)
def test_the_width_of_lfm2s_mlp_is_that_of_transformers(change):
    theirs = Lfm2ForCausalLM(Lfm2Config(**LFM2 | {"num_hidden_layers": 1} | change))
    expected = sum(parameter.numel() for parameter in theirs.parameters())
    assert describe_model(LFM2 | {"num_hidden_layers": 1} | change).num_parameters == expected


@pytest.mark.parametrize(
    "theirs", [Zamba2Config(), ZambaConfig(), ZambaConfig(attn_layer_period=4, attn_layer_offset=2)]
)
def test_zambas_have_the_layers_of_transformers_where_their_configs_have_no_list(theirs):
    periods = {name: value for name, value in theirs.to_dict().items() if name.startswith("attn_layer_")}
    config = {"model_type": theirs.model_type} | periods
    with_attention = [layer.index for layer in describe_model(config).layers if layer.kind == FULL]
    assert with_attention == [index for index, kind in enumerate(theirs.layers_block_type) if kind == "hybrid"]


def test_experts_come_at_their_own_period():
    layers = describe_model(JAMBA | {"num_experts": 6}).layers
    assert [layer.num_experts for layer in layers] == [0, 6, 0, 0, 0, 6, 0]
    assert {layer.num_experts for layer in describe_model(JAMBA | {"num_experts": 1}).layers} == {0}


@pytest.mark.parametrize(
    ("config", "rotary_size"),
    [
        (JAMBA | {"rope_theta": 100.0}, 0),
        (BAMBA | {"attn_layer_indices": [2]}, 4),
        (GRANITE | {"layer_types": OLD_LIST, "rope_theta": 100.0}, 0),
        (GRANITE | {"layer_types": OLD_LIST, "position_embedding_type": "rope"}, 8),
    ],
    ids=["jamba: none", "bamba: half a head", "granite: none", "granite: asked for"],
)
def test_what_turns_in_an_attention_layer(config, rotary_size):
    assert describe_model(config).layers[2].rope.rotary_size == rotary_size
    assert str(describe_model(config).layers[2].rope) == ("default" if rotary_size else "none")


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        (None, (0.0, math.inf)),
        ([0.1, {"__float__": "Infinity"}], (0.1, math.inf)),
        ((0, 2), (0.0, 2.0)),
    ],
    ids=["none", "as transformers writes infinity", "numbers"],
)
def test_limits_of_time_steps(limit, expected):
    assert time_step_limit(limit) == expected


@pytest.mark.parametrize(
    ("config_class", "defaults"),
    [
        (JambaConfig, jamba.JAMBA_DEFAULTS),
        (BambaConfig, bamba.BAMBA_DEFAULTS),
        (GraniteMoeHybridConfig, bamba.GRANITE_DEFAULTS),
        (Lfm2Config, lfm.LFM2_DEFAULTS),
        (Lfm3Config, lfm.LFM3_DEFAULTS),
        (FalconH1Config, falcon_h1.DEFAULTS),
        (NemotronHConfig, nemotron_h.DEFAULTS),
        (RecurrentGemmaConfig, recurrent_gemma.DEFAULTS),
        (ZambaConfig, zamba.DEFAULTS),
        (Zamba2Config, zamba2.DEFAULTS),
        (Lfm2MoeConfig, lfm_moe.DEFAULTS),
        (KimiLinearConfig, kimi_linear.DEFAULTS),
        (MiniMaxConfig, minimax.DEFAULTS),
        (OlmoHybridConfig, olmo_hybrid.DEFAULTS),
        (Qwen3NextConfig, qwen_next.QWEN3_NEXT_DEFAULTS),
        (Qwen3_5TextConfig, qwen_next.QWEN3_5_DEFAULTS),
        (Qwen3_5MoeTextConfig, qwen_next.QWEN3_5_MOE_DEFAULTS),
        (MambaConfig, mamba.MAMBA_DEFAULTS),
        (FalconMambaConfig, mamba.FALCON_MAMBA_DEFAULTS),
        (Mamba2Config, mamba.MAMBA2_DEFAULTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_defaults_are_those_of_transformers(config_class, defaults):
    fields = {name: getattr(config_class, name) for name in defaults if not name.startswith("rope_")}
    assert fields == {name: value for name, value in defaults.items() if not name.startswith("rope_")}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (JAMBA | {"attn_layer_offset": 3}, r"attn_layer_offset is 3, must be a whole number below attn_layer_period"),
        (JAMBA | {"expert_layer_period": 0}, "expert_layer_period = 0"),
        (JAMBA | {"num_experts": 2, "num_experts_per_tok": 3}, r"must be at most the number of experts \(2\)"),
        (JAMBA | {"layer_types": [FULL]}, "layer_types has 1 entries, must have one for each of the 7"),
        (JAMBA | {"layer_types": ["conv"] * 7}, "layer_types holds conv; known here: full_attention, mamba"),
        (BAMBA | {"mamba_n_heads": 5}, "their product must be mamba_expand"),
        (GRANITE | {"mamba_d_head": 5}, "their product must be mamba_expand"),
        ({"model_type": "mamba2", "head_dim": 63}, "their product must be expand"),
        (LFM3 | {"layer_types": ["mamba"] * 7}, "layer_types holds mamba; known here: full_attention, sliding"),
        (LFM3 | {"conv_L_cache": 1}, "conv_L_cache is 1, must be at least 2"),
        ({"model_type": "mamba", "hidden_act": "relu"}, "the activation is 'relu'"),
        ({"model_type": "mamba", "hidden_act": "gelu_pytorch_tanh"}, "recurrent layers want silu"),
    ],
    ids=[
        "offset",
        "period",
        "experts",
        "short list",
        "foreign",
        "heads",
        "head size",
        "mamba2",
        "no mamba",
        "one input",
        "relu",
        "gelu",
    ],
)
def test_a_config_that_cannot_be_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        describe_model(config)
