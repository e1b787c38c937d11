"""A decoder of our own with three kinds of memory: full attention, sliding windows and Mamba-2 in any order.

Nobody has trained one. It is here to prove, with weights made at random, that such mixes run like any other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.bamba import mamba2_info
from hybrid_engine.models.base import FULL, MAMBA2, SLIDING, Model
from hybrid_engine.models.config import DecoderConfig, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 6,
    "layer_types": None,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "sliding_window": 512,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 32_768,
    "rope_theta": 10_000.0,
    "eos_token_id": None,
    "bos_token_id": None,
    "tie_word_embeddings": False,
    "mamba_n_heads": 32,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}


def resolve_three_kinds(config: Mapping[str, Any]) -> DecoderConfig:
    """A norm before each mixer and each gated MLP. Raises ConfigError when layer_types is missing."""
    values = with_defaults(config, DEFAULTS)
    if values["layer_types"] is None:
        raise ConfigError(f"layer_types is missing, must list each layer as {FULL}, {SLIDING} or {MAMBA2}")
    num_layers = positive(values, "num_hidden_layers")
    kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, SLIDING, MAMBA2))
    return resolve(values, kinds, mamba=mamba2_info(values))


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A decoder of three kinds without weights."""
    return Decoder(config, DenseLayer, dtype=dtype)
