"""Olmo 3 and Exaone 4: norms behind the sublayers, windows with a full layer every so often."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import FULL, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    kinds_of,
    positive,
    resolve,
    with_defaults,
    without_rope,
)
from hybrid_engine.models.layers.attention import WideNormAttention
from hybrid_engine.models.stream import PostNormLayer, StreamDecoder

COMMON_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
    "layer_types": None,
}
OLMO3_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 50_304,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "attention_bias": False,
    "bos_token_id": None,
    "eos_token_id": 50_279,
    "rope_theta": 500_000.0,
}
EXAONE4_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 102_400,
    "intermediate_size": 16_384,
    "num_key_value_heads": 32,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "sliding_window_pattern": 4,
    "rope_theta": 10_000.0,
}


def resolve_olmo3(config: Mapping[str, Any]) -> DecoderConfig:
    """Every fourth layer is full; rope_scaling, as released checkpoints have it, is of those alone."""
    values = with_defaults(config, OLMO3_DEFAULTS)
    values["rope_local_base_freq"] = values["rope_theta"]
    kinds = kinds_of(values, default_pattern=4)
    return replace(
        resolve(values, kinds),
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )


def resolve_exaone4(config: Mapping[str, Any]) -> DecoderConfig:
    """Full layers know no positions where others have a window; without one, all layers are full and turn."""
    pattern = config.get("sliding_window_pattern")
    values = with_defaults({**config, "sliding_window_pattern": from_letters(pattern) or None}, EXAONE4_DEFAULTS)
    num_layers = positive(values, "num_hidden_layers")
    if values["sliding_window"] is None and values["layer_types"] is None:
        kinds: tuple[str, ...] = (FULL,) * num_layers
    else:
        kinds = kinds_of(values, default_pattern=4)
    if isinstance(pattern, str) and values["layer_types"] is None:
        kinds = (*kinds[:-1], FULL)
    base = replace(resolve(values, kinds), has_qk_norm=True)
    return base if values["sliding_window"] is None else without_rope(base, FULL)


def from_letters(pattern: Any) -> Any:
    """A pattern such as "LLLG", of local and global layers, as a list: true for a local one. Others stay as they are.

    Raises ConfigError for other letters.
    """
    if not isinstance(pattern, str):
        return pattern
    if not pattern or set(pattern) - {"L", "G"}:
        raise ConfigError(f"sliding_window_pattern is {pattern!r}, must be of the letters L and G")
    return [letter == "L" for letter in pattern]


class Olmo3Layer(PostNormLayer):
    """Queries and keys are normed over all heads together."""

    attention_class = WideNormAttention


def build_olmo3(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """An Olmo 3 without weights."""
    return StreamDecoder(config, Olmo3Layer, dtype=dtype)


def build_exaone4(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """An Exaone 4 without weights."""
    return StreamDecoder(config, PostNormLayer, dtype=dtype)
