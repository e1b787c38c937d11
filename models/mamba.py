"""Mamba, Falcon-Mamba and Mamba-2: recurrent layers and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.bamba import time_step_limit
from hybrid_engine.models.base import MAMBA, MAMBA2, MambaInfo, Model
from hybrid_engine.models.config import DecoderConfig, Names, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import MixerLayer

REACH_TOKENS = 2**20
"""These models have no limit of their own; a request's book-keeping wants one."""

COMMON_DEFAULTS = {
    "expand": 2,
    "conv_kernel": 4,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "residual_in_fp32": True,
    "bos_token_id": 0,
}
MAMBA_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 50_280,
    "hidden_size": 768,
    "num_hidden_layers": 32,
    "state_size": 16,
    "time_step_rank": "auto",
    "eos_token_id": 0,
    "tie_word_embeddings": True,
}
FALCON_MAMBA_DEFAULTS = MAMBA_DEFAULTS | {"mixer_rms_eps": 1e-6}
MAMBA2_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 32_768,
    "hidden_size": 4096,
    "num_hidden_layers": 64,
    "num_heads": 128,
    "head_dim": 64,
    "n_groups": 8,
    "state_size": 128,
    "time_step_limit": (0.0, math.inf),
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
NAMES = Names(
    embedding="backbone.embeddings",
    layers="backbone.layers",
    input_norm="norm",
    mamba="mixer",
    final_norm="backbone.norm_f",
)


def resolve_mamba(config: Mapping[str, Any]) -> DecoderConfig:
    """Mamba-1 in every layer."""
    values = with_defaults(config, MAMBA_DEFAULTS)
    return _resolve(values, MAMBA, _mamba_info(values))


def resolve_falcon_mamba(config: Mapping[str, Any]) -> DecoderConfig:
    """Mamba-1 in every layer, its time steps, B and C normed without weights."""
    values = with_defaults(config, FALCON_MAMBA_DEFAULTS)
    norms = {"has_inner_norms": True, "has_inner_norm_weights": False, "inner_norm_eps": values["mixer_rms_eps"]}
    return _resolve(values, MAMBA, replace(_mamba_info(values), **norms))


def resolve_mamba2(config: Mapping[str, Any]) -> DecoderConfig:
    """Mamba-2 in every layer. Raises ConfigError when the heads don't make up the inner width."""
    values = with_defaults(config, MAMBA2_DEFAULTS)
    info = replace(
        _common_info(values),
        num_heads=positive(values, "num_heads"),
        num_groups=positive(values, "n_groups"),
        dt_limit=time_step_limit(values["time_step_limit"]),
    )
    if info.num_heads * positive(values, "head_dim") != info.inner_size:
        raise ConfigError(
            f"num_heads is {info.num_heads} and head_dim {values['head_dim']}: "
            f"their product must be expand * hidden_size ({info.inner_size})"
        )
    return _resolve(values, MAMBA2, info)


def _mamba_info(values: Mapping[str, Any]) -> MambaInfo:
    rank = values["time_step_rank"]
    rank = -(-positive(values, "hidden_size") // 16) if rank == "auto" else positive(values, "time_step_rank")
    return replace(_common_info(values), dt_rank=rank)


def _common_info(values: Mapping[str, Any]) -> MambaInfo:
    return MambaInfo(
        inner_size=int(values["expand"] * positive(values, "hidden_size")),
        state_size=positive(values, "state_size"),
        conv_width=positive(values, "conv_kernel"),
        has_conv_bias=values["use_conv_bias"],
        has_bias=values["use_bias"],
    )


def _resolve(values: dict[str, Any], kind: str, info: MambaInfo) -> DecoderConfig:
    values |= {
        "intermediate_size": info.inner_size,
        "rms_norm_eps": values["layer_norm_epsilon"],
        "max_position_embeddings": REACH_TOKENS,
    }
    return replace(
        resolve(values, (kind,) * positive(values, "num_hidden_layers"), mamba=info),
        has_float32_residual=values["residual_in_fp32"],
        names=NAMES,
    )


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Mamba of either kind, without weights."""
    return Decoder(config, MixerLayer, dtype=dtype)
