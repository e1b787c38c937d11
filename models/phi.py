"""Phi 3 and Phi 4 mini: a plain decoder whose projections the checkpoint keeps fused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.models.base import FULL, SLIDING, Model
from hybrid_engine.models.config import DecoderConfig, Names, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.rope import LONGROPE

PHI3_DEFAULTS = {
    "vocab_size": 32_064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
    "bos_token_id": 1,
    "eos_token_id": 32_000,
    "sliding_window": None,
}
NAMES = Names(qkv=("qkv_proj",), mlp_gate_up=("gate_up_proj",))
OLD_LONGROPE = ("su", "yarn")
"""What the first checkpoints called it."""


def resolve_phi3(config: Mapping[str, Any]) -> DecoderConfig:
    """One window for all layers, or none; a head may turn in part, with frequencies scaled one by one."""
    values = with_defaults(config, PHI3_DEFAULTS)
    kind = FULL if values["sliding_window"] is None else SLIDING
    for key in ("rope_scaling", "rope_parameters"):
        fields = dict(values.get(key) or {})
        if (fields.get("rope_type") or fields.get("type")) in OLD_LONGROPE:
            values[key] = fields | {"rope_type": LONGROPE}
    return replace(resolve(values, (kind,) * positive(values, "num_hidden_layers")), names=NAMES)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Phi without weights."""
    return Decoder(config, DenseLayer, dtype=dtype)
