"""Granite with sliding windows: Granite's multipliers, sinks in every layer, a rope of each layer's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.bamba import factor
from hybrid_engine.models.base import FULL, SLIDING, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.rope import NO_ROPE

GRANITE_SWA_DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 2560,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 100_257,
    "eos_token_id": 100_257,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "mlp_bias": False,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "sliding_window": 128,
    "layer_types": None,
    "layer_rope_theta": None,
}


def resolve_granite_swa(config: Mapping[str, Any]) -> DecoderConfig:
    """Layers 0, 4, 8, … are full; layer_rope_theta gives each layer's base, 0 for none."""
    values = with_defaults(config, GRANITE_SWA_DEFAULTS)
    num_layers = positive(values, "num_hidden_layers")
    kinds = tuple(SLIDING if index % 4 else FULL for index in range(num_layers))
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers)
    base = resolve(values, kinds)
    thetas = values["layer_rope_theta"]
    if thetas is not None and len(thetas) != num_layers:
        raise ConfigError(f"layer_rope_theta has {len(thetas)} entries, must have one for each of {num_layers} layers")
    return replace(
        base,
        layers=tuple(_row(layer, layer.rope.theta if thetas is None else thetas[layer.index]) for layer in base.layers),
        attention_scale=values["attention_multiplier"],
        embedding_scale=factor(values, "embedding_multiplier"),
        residual_scale=factor(values, "residual_multiplier"),
        logits_divisor=factor(values, "logits_scaling"),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_mlp_bias=values["mlp_bias"],
    )


def _row(layer: LayerInfo, theta: float) -> LayerInfo:
    rope = replace(layer.rope, theta=float(theta)) if theta else NO_ROPE
    return replace(layer, rope=rope, has_sinks=True)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Granite with windows, without weights."""
    return Decoder(config, DenseLayer, dtype=dtype)
