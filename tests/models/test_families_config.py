"""Configs of the families that only attend: what they leave out, and the old way of writing them."""

from __future__ import annotations

import pytest
import transformers as hf

from hybrid_engine.models import cohere, gemma3n, gemma4, gpt_oss, granite_swa, llama, llama4, mimo, olmo, phi, sparse
from hybrid_engine.models.registry import describe_model

SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
OLD_NAMES = {"sliding_window_pattern", "global_head_dim", "num_global_key_value_heads", "per_layer_config"}
"""Fields that configs have and config classes take apart."""
FAMILIES = [
    (hf.Phi3Config, phi.PHI3_DEFAULTS),
    (hf.MinistralConfig, llama.MINISTRAL_DEFAULTS),
    (hf.Olmo3Config, olmo.OLMO3_DEFAULTS),
    (hf.Exaone4Config, olmo.EXAONE4_DEFAULTS),
    (hf.Cohere2Config, cohere.COHERE2_DEFAULTS),
    (hf.GraniteSWAConfig, granite_swa.GRANITE_SWA_DEFAULTS),
    (hf.GptOssConfig, gpt_oss.GPT_OSS_DEFAULTS),
    (hf.Llama4TextConfig, llama4.LLAMA4_DEFAULTS),
    (hf.MiMoV2FlashConfig, mimo.MIMO_DEFAULTS),
    (hf.Gemma3nTextConfig, gemma3n.GEMMA3N_DEFAULTS),
    (hf.Gemma4TextConfig, gemma4.GEMMA4_DEFAULTS),
    (hf.MixtralConfig, sparse.MIXTRAL_DEFAULTS),
    (hf.Qwen3MoeConfig, sparse.QWEN3_MOE_DEFAULTS),
]
every_config = pytest.mark.parametrize(
    ("config_class", "defaults"), FAMILIES, ids=lambda value: getattr(value, "__name__", "")
)


@every_config
def test_defaults_are_those_of_transformers(config_class, defaults):
    compared = {
        name: value
        for name, value in defaults.items()
        if name not in OLD_NAMES and not name.startswith(("rope_", "partial_rotary"))
    }
    assert {name: getattr(config_class, name) for name in compared} == compared


@every_config
def test_an_empty_config_is_described_as_transformers_would_build_it(config_class, defaults):
    theirs = config_class()
    layers = describe_model({"model_type": config_class.model_type}).layers
    if listed := getattr(theirs, "layer_types", None):
        assert [layer.kind for layer in layers] == listed
    assert len(layers) == theirs.num_hidden_layers
    ropes = theirs.rope_parameters
    for layer in layers:
        fields = ropes.get(layer.kind, ropes)
        if layer.rope.rotary_size:
            assert layer.rope.theta == fields["rope_theta"]
            assert layer.rope_scaling.split()[0] == {"proportional": "128"}.get(
                fields["rope_type"], fields["rope_type"]
            )


SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ({"model_type": "cohere2", "sliding_window_pattern": 3}, [SLIDING, SLIDING, FULL] * 2 + [SLIDING, SLIDING]),
        ({"model_type": "exaone4", "sliding_window_pattern": "LLLG"}, [SLIDING, SLIDING, SLIDING, FULL] * 2),
        ({"model_type": "llama4_text", "no_rope_layer_interval": 2}, [CHUNKED, FULL] * 4),
        ({"model_type": "llama4_text", "attention_chunk_size": None}, [FULL] * 8),
        ({"model_type": "mimo_v2_flash"}, [FULL, *[SLIDING] * 4, FULL, SLIDING, SLIDING]),
        ({"model_type": "ministral", "sliding_window": None}, [FULL] * 8),
        ({"model_type": "phi3"}, [FULL] * 8),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_patterns_give_the_layers(config, kinds):
    assert [layer.kind for layer in describe_model(SMALL | config).layers] == kinds


def test_layers_without_positions_are_those_that_say_so():
    layers = describe_model(SMALL | {"model_type": "llama4_text", "no_rope_layers": [1, 0, 0, 1, 1, 1, 1, 1]}).layers
    assert [layer.rope.rotary_size > 0 for layer in layers] == [True, False, False, True, True, True, True, True]
    full = [layer for layer in describe_model(SMALL | {"model_type": "cohere2"}).layers if layer.kind == FULL]
    assert {layer.rope.rotary_size for layer in full} == {0}


def test_a_released_mimo_counts_its_window_without_the_query():
    config = SMALL | {"model_type": "mimo_v2_flash", "sliding_window_size": 128}
    assert {layer.window for layer in describe_model(config).layers} == {None, 129}


def test_gemma_4_writes_head_sizes_of_full_layers_in_two_ways():
    old = SMALL | {"model_type": "gemma4_text", "head_dim": 8, "global_head_dim": 16}
    new = old | {"per_layer_config": {"5": {"head_dim": 16}, "7": {"head_dim": 16}}, "global_head_dim": 4}
    assert describe_model(old).layers == describe_model(new).layers
    assert [layer.head_size for layer in describe_model(old).layers] == [8, 8, 8, 8, 8, 16, 8, 16]


def test_the_first_phi_3_with_long_contexts_call_the_scaling_otherwise():
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0, 3.0, 4.0, 5.0]}
    config = SMALL | {"model_type": "phi3", "max_position_embeddings": 8192}
    ropes = [
        describe_model(config | {"rope_scaling": {"type": name, **factors}}).layers[0].rope
        for name in ("longrope", "su", "yarn")
    ]
    assert ropes[0] == ropes[1] == ropes[2]
    assert ropes[0].divisors == (2.0, 3.0, 4.0, 5.0)


def test_a_model_that_reaches_no_further_than_its_first_context_turns_by_the_short_factors():
    factors = {"short_factor": [1.5] * 4, "long_factor": [2.0] * 4}
    config = SMALL | {"model_type": "phi3", "max_position_embeddings": 4096}
    rope = describe_model(config | {"rope_scaling": {"type": "longrope", **factors}}).layers[0].rope
    assert (rope.divisors, rope.magnitude) == ((1.5,) * 4, 1.0)
