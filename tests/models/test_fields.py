"""Every field of a config has a rule, and what breaks it is refused by name."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.fields import FIELDS, ROPE_FIELDS
from hybrid_engine.models.registry import ARCHITECTURES, describe_model

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "mamba_n_heads": 6,
    "num_heads": 6,
    "head_dim": 8,
    "n_groups": 2,
    "num_kv_shared_layers": 0,
}
LLAMA, GEMMA = SMALL | {"model_type": "llama"}, SMALL | {"model_type": "gemma2"}
JAMBA = SMALL | {"model_type": "jamba"}
FITTING = {
    "falcon_h1": {"layer_types": None, "mamba_d_ssm": None},
    "recurrent_gemma": {"layer_types": ["linear_attention", "sliding_attention"]},
    "zamba": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 6},
    "zamba2": {"layer_types": ["mamba", "hybrid"], "n_mamba_heads": 6},
    "nemotron_h": {"layer_types": ["mamba", "moe"]},
}
"""What SMALL lacks for an architecture, or has too much."""


def rope(**fields) -> dict:
    return {"rope_parameters": {"rope_theta": 100.0, **fields}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"num_key_value_heads": "x"}, r"num_key_value_heads = 'x', must be a whole number above 0, or null"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads = 0"),
        (LLAMA | {"hidden_size": 24.0}, "hidden_size = 24.0"),
        (LLAMA | {"hidden_size": True}, "hidden_size = True"),
        (LLAMA | {"hidden_size": 10**400}, "hidden_size = 10000"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps = None, must be a number of at least 0"),
        (LLAMA | {"rms_norm_eps": math.nan}, "rms_norm_eps = nan"),
        (LLAMA | {"eos_token_id": "x"}, "eos_token_id = 'x', must be a whole number of at least 0, or a list of such"),
        (LLAMA | {"eos_token_id": [1, None]}, r"eos_token_id = \[1, None\]"),
        (LLAMA | {"bos_token_id": -1}, "bos_token_id = -1"),
        (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false', must be true or false"),
        (LLAMA | {"hidden_act": ["silu"]}, r"hidden_act = \['silu'\], must be a text"),
        (LLAMA | {"rope_theta": "1e4"}, "rope_theta = '1e4', must be a number above 1"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling = 'linear', must be an object, or null"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0}}, "the model's rope_scaling has factor = 0"),
        (LLAMA | rope(rope_type="yarn", factor="4"), "the model's rope_parameters has factor = '4'"),
        (
            LLAMA | rope(partial_rotary_factor=1.5),
            "partial_rotary_factor = 1.5, must be a number above 0 and at most 1",
        ),
        (LLAMA | rope(partial_rotary_factor=0.4), "3 of a head's 8 elements are to turn, must be an even number"),
        (LLAMA | rope(rope_type="llama3", low_freq_factor=4.0), "low_freq_factor is 4, must be below high_freq_factor"),
        (
            LLAMA | rope(rope_type="divisors", divisors=[1.0]),
            r"there are 1 rope divisors, must be one a frequency \(4\)",
        ),
        (
            LLAMA | {"num_attention_heads": 48, "head_dim": None},
            r"num_attention_heads is 48, must be at most hidden_size \(24\)",
        ),
        (GEMMA | {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar = 0, must be a number above 0"),
        (GEMMA | {"layer_types": "full_attention"}, "layer_types = 'full_attention', must be a list"),
        (GEMMA | {"layer_types": [["full_attention"], 1]}, "layer_types = "),
        (GEMMA | {"sliding_window_pattern": []}, r"sliding_window_pattern = \[\]"),
        (
            GEMMA | {"model_type": "gemma3_text", "rope_parameters": {"full_attention": 5, "sliding_attention": None}},
            "the model's rope_parameters has full_attention = 5, must be an object, or null",
        ),
        (
            GEMMA | {"model_type": "gemma3_text", "rope_parameters": {"sliding_attention": {"factor": -1}}},
            "the model's rope_parameters of sliding_attention has factor = -1",
        ),
        (JAMBA | {"mamba_dt_rank": None}, "mamba_dt_rank = None, must be a whole number above 0, or 'auto'"),
        (JAMBA | {"attn_layer_offset": "1"}, "attn_layer_offset = '1'"),
        (SMALL | {"model_type": "bamba", "attn_layer_indices": 3}, "attn_layer_indices = 3, must be a list"),
        (SMALL | {"model_type": "mamba2", "time_step_limit": [0, "x"]}, "time_step_limit = .*must be a list of two"),
        (
            SMALL | {"model_type": "mamba2", "n_groups": 4},
            "6 Mamba-2 heads can't share 4 groups",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_value_that_cannot_be_is_refused_by_name(config, message):
    with pytest.raises(ConfigError, match=message):
        describe_model(config)


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@pytest.mark.parametrize("wrong", ["x", [], {}, -1, 0.5], ids=str)
def test_no_value_of_a_wrong_kind_ends_in_anything_but_a_config_error(model_type, wrong):
    config = SMALL | {"model_type": model_type, "layer_types": ["full_attention"] * 2} | FITTING.get(model_type, {})
    assert describe_model(config)
    for name in FIELDS.keys() - {"model_type"}:
        try:
            describe_model(config | {name: wrong})
        except ConfigError:
            continue


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ([LLAMA], "the model's config is a list, must be an object"),
        (LLAMA | {"text_config": 5}, "text_config = 5, must be an object"),
        (LLAMA | {"model_type": ["llama"]}, r"no architecture here reads model_type \['llama'\]"),
        (LLAMA | {"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\): of quantised"),
        ({"text_config": LLAMA, "quantization_config": {"quant_method": "awq"}}, r"quantization_config \(awq\)"),
    ],
    ids=["a list", "text_config", "model_type", "quantised", "quantised inside"],
)
def test_a_config_of_another_kind_is_refused(config, message):
    with pytest.raises(ConfigError, match=message):
        describe_model(config)


def test_every_field_that_is_read_has_a_rule(repository: Path):
    read = {name for file in (repository / "models").glob("*.py") for name in fields_read(ast.parse(file.read_text()))}
    assert {"rope_theta", "num_key_value_heads", "mamba_d_state", "conv_L_cache"} <= read
    inside = {"quant_method", "__float__", "text_config"}
    assert not read - FIELDS.keys() - ROPE_FIELDS.keys() - inside


def fields_read(tree: ast.AST) -> set[str]:
    """Names in `values["x"]`, `values.get("x")` and `positive(values, "x")`; values may be `config` or `fields` too."""
    names = set()
    for node in ast.walk(tree):
        key = None
        if isinstance(node, ast.Subscript) and is_config(node.value):
            key = node.slice
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_config(node.func.value):
            key = node.args[0] if node.func.attr == "get" else None
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("positive", "factor"):
            key = node.args[1]
        if isinstance(key, ast.Constant) and isinstance(key.value, str):
            names.add(key.value)
    return names


def is_config(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id in ("values", "config", "fields")
