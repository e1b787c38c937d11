"""Configs in the old and the new schema, and what they leave out."""

from __future__ import annotations

import pytest
from transformers import Gemma2Config, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

from hybrid_engine.errors import ConfigError, UnknownModelError
from hybrid_engine.groups.spec import ChunkedLocalSpec, FullAttentionSpec, SlidingWindowSpec
from hybrid_engine.models import gemma, llama
from hybrid_engine.models.base import LayerInfo
from hybrid_engine.models.layers.rope import Rope
from hybrid_engine.models.registry import ARCHITECTURES, build_model, describe_model

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 8,
    "max_position_embeddings": 512,
}
GEMMA3_NEW = SMALL | {
    "model_type": "gemma3_text",
    "layer_types": [SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL, SLIDING],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 500.0},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 7000.0},
    },
}
GEMMA3_OLD = SMALL | {
    "model_type": "gemma3_text",
    "sliding_window_pattern": 3,
    "rope_theta": 7000.0,
    "rope_local_base_freq": 500.0,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}
PATTERN_LIST = [True, True, False]
ROPE_LLAMA = {"rope_type": "linear", "factor": 2.0}


def with_key(config: dict, old: str, new: str) -> dict:
    return {new if key == old else key: value for key, value in config.items()}


@pytest.mark.parametrize(
    "config",
    [
        GEMMA3_OLD,
        with_key(GEMMA3_OLD, "sliding_window_pattern", "_sliding_window_pattern"),
        GEMMA3_OLD | {"sliding_window_pattern": PATTERN_LIST},
        GEMMA3_OLD | {"rope_scaling": {"type": "linear", "factor": 8.0}},
        {"model_type": "gemma3", "text_config": GEMMA3_OLD, "vision_config": {}},
    ],
    ids=["pattern", "underscored pattern", "pattern as a list", "scaling's old key", "inside a multimodal config"],
)
def test_old_and_new_schemas_give_the_same_layer_table(config):
    assert describe_model(config).layers == describe_model(GEMMA3_NEW).layers


def test_the_layer_table_says_what_the_config_says():
    layers = describe_model(GEMMA3_NEW).layers
    assert [layer.kind for layer in layers] == GEMMA3_NEW["layer_types"]
    assert [layer.window for layer in layers] == [8, 8, None, 8, 8, None, 8]
    assert [layer.rope_theta for layer in layers[1:3]] == [500.0, 7000.0]
    assert [layer.rope_scaling for layer in layers[1:3]] == ["default", "linear x8"]


def test_rope_fields_may_stand_alone_or_in_a_flat_dict():
    old = SMALL | {"model_type": "llama", "rope_theta": 700.0, "rope_scaling": ROPE_LLAMA}
    new = SMALL | {"model_type": "llama", "rope_parameters": {"rope_theta": 700.0, **ROPE_LLAMA}}
    assert describe_model(old).layers == describe_model(new).layers
    assert describe_model(old).layers[0].rope == Rope(
        theta=700.0, rotary_size=8, scaling="linear", factor=2.0, original_max_position_embeddings=512
    )


def test_part_of_a_head_may_turn():
    config = SMALL | {"model_type": "llama", "partial_rotary_factor": 0.5}
    assert describe_model(config).layers[0].rope.rotary_size == 4


@pytest.mark.parametrize(
    ("window", "kinds"),
    [({"use_sliding_window": True, "max_window_layers": 5}, [FULL] * 5 + [SLIDING] * 2), ({}, [FULL] * 7)],
    ids=["from a layer on", "switched off"],
)
def test_qwen_slides_above_max_window_layers_when_switched_on(window, kinds):
    assert [layer.kind for layer in describe_model(SMALL | window | {"model_type": "qwen2"}).layers] == kinds


def test_mistral_without_a_window_is_full_attention():
    config = SMALL | {"model_type": "mistral", "sliding_window": None}
    assert {layer.kind for layer in describe_model(config).layers} == {FULL}


@pytest.mark.parametrize(
    ("config_class", "defaults"),
    [
        (Gemma2Config, gemma.GEMMA2_DEFAULTS),
        (Gemma3TextConfig, gemma.GEMMA3_DEFAULTS),
        (LlamaConfig, llama.LLAMA_DEFAULTS),
        (MistralConfig, llama.MISTRAL_DEFAULTS),
        (Qwen2Config, llama.QWEN2_DEFAULTS),
        (Qwen3Config, llama.QWEN3_DEFAULTS),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_defaults_are_those_of_transformers(config_class, defaults):
    fields = {name: getattr(config_class, name) for name in defaults if not name.startswith("rope_")}
    assert fields == {name: value for name, value in defaults.items() if not name.startswith("rope_")}


def test_an_empty_gemma3_config_is_described_as_transformers_would_build_it():
    theirs = Gemma3TextConfig()
    layers = describe_model({"model_type": "gemma3_text"}).layers
    assert [layer.kind for layer in layers] == theirs.layer_types
    thetas = {kind: rope["rope_theta"] for kind, rope in theirs.rope_parameters.items()}
    assert {layer.kind: layer.rope_theta for layer in layers} == thetas


def test_a_layer_keeps_what_its_kind_needs():
    sizes = {"num_heads": 3, "num_kv_heads": 1, "head_size": 8, "rope": Rope(1e4, 8)}
    layers = [
        LayerInfo(index=0, kind=FULL, **sizes),
        LayerInfo(index=1, kind=SLIDING, window=8, **sizes),
        LayerInfo(index=2, kind="chunked_attention", chunk=16, **sizes),
    ]
    assert [layer.cache_spec(block_size=32, element_bytes=2) for layer in layers] == [
        FullAttentionSpec(1, 8, 2, 32),
        SlidingWindowSpec(1, 8, 2, 32, window=8),
        ChunkedLocalSpec(1, 8, 2, 32, chunk=16),
    ]


def test_cache_specs_are_by_layer_index():
    specs = describe_model(GEMMA3_NEW).cache_specs(block_size=16, element_bytes=2)
    assert [index for index, spec in specs.items() if isinstance(spec, FullAttentionSpec)] == [2, 5]


@pytest.mark.parametrize(("value", "ids"), [(1, (1,)), ([1, 106], (1, 106)), (None, ())], ids=["one", "two", "none"])
def test_end_tokens_come_as_one_or_several(value, ids):
    assert describe_model(GEMMA3_NEW | {"eos_token_id": value}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": [FULL]}, "layer_types has 1 entries, must have one for each of the 7 layers"),
        ({"layer_types": ["conv"] * 7}, "layer_types holds conv; known here"),
        ({"sliding_window": None}, "sliding_window = None, must be a whole number above 0"),
        ({"hidden_size": 0}, "hidden_size = 0"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, r"must be a multiple of num_key_value_heads \(3\)"),
        ({"hidden_activation": "relu"}, "the activation is 'relu', must be one of gelu, gelu_pytorch_tanh"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling is 'dynamic', must be one of default, linear"),
        ({"use_bidirectional_attention": True}, "an embedding model"),
    ],
    ids=["short list", "foreign kind", "no window", "no width", "heads", "activation", "rope", "bidirectional"],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        describe_model(GEMMA3_NEW | change)


@pytest.mark.parametrize("kind", ["griffin", None], ids=["foreign", "missing"])
def test_an_unknown_architecture_names_the_known_ones(kind):
    with pytest.raises(UnknownModelError, match=f"{kind!r}; known: {', '.join(ARCHITECTURES)}"):
        describe_model({"model_type": kind})


def test_a_dtype_that_models_do_not_compute_in_is_refused():
    import torch

    with pytest.raises(ConfigError, match="dtype is float16, must be float32 or bfloat16"):
        build_model(GEMMA3_NEW, dtype=torch.float16)
