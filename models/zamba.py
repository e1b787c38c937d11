"""Zamba, the first: Mamba-1 in every layer, and before some the same transformer block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import MAMBA, MambaInfo
from hybrid_engine.models.config import Names, positive, with_defaults
from hybrid_engine.models.jamba import period_of
from hybrid_engine.models.zamba2 import HYBRID, ZambaConfig, layer_pattern, shared_blocks

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 3712,
    "intermediate_size": 14_848,
    "num_hidden_layers": 76,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "attention_hidden_size": None,
    "attention_head_dim": None,
    "hidden_act": "gelu",
    "hidden_mamba_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
    "attn_layer_period": 6,
    "attn_layer_offset": 4,
    "n_mamba_heads": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
FIRST = ("mamba", "mamba", HYBRID)
"""The layers before those that come at a period."""


def resolve_zamba(config: Mapping[str, Any]) -> ZambaConfig:
    """Layers with the shared block have two rows: its attention, then Mamba-1. Raises ConfigError for other widths."""
    values = with_defaults(config, DEFAULTS)
    width, num_heads = positive(values, "hidden_size"), positive(values, "num_attention_heads")
    for key, wanted in (("attention_hidden_size", 2 * width), ("attention_head_dim", 2 * width // num_heads)):
        if values[key] not in (None, wanted):
            raise ConfigError(f"{key} is {values[key]}, must follow from hidden_size and the heads ({wanted})")
    if values["hidden_mamba_act"] != "silu":
        raise ConfigError(f"hidden_mamba_act is {values['hidden_mamba_act']!r}, must be 'silu'")
    every, offset = period_of(values, "attn_layer")
    rest = range(positive(values, "num_hidden_layers") - len(FIRST))
    pattern = layer_pattern(values, FIRST + tuple(HYBRID if i % every == offset else "mamba" for i in rest))
    return replace(
        shared_blocks(values, pattern, mamba_info(values), recurrent=MAMBA),
        block="shared_transf",
        names=Names(final_norm="model.final_layernorm", mlp="feed_forward"),
    )


def mamba_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent rows. Raises ConfigError when the channels can't be sliced so."""
    rank, num_slices = values["mamba_dt_rank"], positive(values, "n_mamba_heads")
    inner_size = positive(values, "mamba_expand") * positive(values, "hidden_size")
    if inner_size % num_slices:
        raise ConfigError(f"n_mamba_heads is {num_slices}, must divide mamba_expand * hidden_size ({inner_size})")
    return MambaInfo(
        inner_size=inner_size,
        state_size=positive(values, "mamba_d_state"),
        conv_width=positive(values, "mamba_d_conv"),
        num_slices=num_slices,
        dt_rank=-(-values["hidden_size"] // 16) if rank == "auto" else positive(values, "mamba_dt_rank"),
        has_conv_bias=values["mamba_conv_bias"],
        has_bias=values["mamba_proj_bias"],
    )
