"""Jamba: Mamba-1 layers, some attention layers that know no positions, experts in some of the MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import MAMBA, LayerInfo, MambaInfo, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    Names,
    experts_per_token,
    hybrid_kinds,
    positive,
    resolve,
    with_defaults,
)
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, MoeMlp, separate_experts, softmax_then_top

JAMBA_DEFAULTS = {
    "vocab_size": 65_536,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 262_144,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "attn_layer_period": 8,
    "attn_layer_offset": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_dt_rank": "auto",
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
NAMES = Names(pre_mlp_norm="pre_ff_layernorm", mlp="feed_forward", final_norm="model.final_layernorm")


def resolve_jamba(config: Mapping[str, Any]) -> DecoderConfig:
    """Attention and experts in every so many layers, counted from an offset."""
    # Its attention has no rope, whatever the config says.
    values = with_defaults(config, JAMBA_DEFAULTS) | {"rope_theta": None, "rope_parameters": None}
    attention_every, attention_from = period_of(values, "attn_layer")
    experts_every, experts_from = period_of(values, "expert_layer")
    kinds = hybrid_kinds(values, recurrent=MAMBA, is_attention=lambda index: index % attention_every == attention_from)
    base = resolve(values, kinds, mamba=mamba_info(values))
    num_experts = positive(values, "num_experts")
    layers = tuple(
        replace(layer, num_experts=num_experts)
        if num_experts > 1 and layer.index % experts_every == experts_from
        else layer
        for layer in base.layers
    )
    return replace(base, layers=layers, num_experts_per_token=experts_per_token(values, num_experts), names=NAMES)


def period_of(values: Mapping[str, Any], name: str) -> tuple[int, int]:
    """(period, offset) at which a kind of layer comes.

    Raises ConfigError when the offset isn't below the period.
    """
    period, offset = positive(values, f"{name}_period"), values[f"{name}_offset"]
    if not isinstance(offset, int) or not 0 <= offset < period:
        raise ConfigError(f"{name}_offset is {offset!r}, must be a whole number below {name}_period ({period})")
    return period, offset


def mamba_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent layers: time steps, B and C are normed."""
    rank = values["mamba_dt_rank"]
    return MambaInfo(
        inner_size=positive(values, "mamba_expand") * positive(values, "hidden_size"),
        state_size=positive(values, "mamba_d_state"),
        conv_width=positive(values, "mamba_d_conv"),
        dt_rank=-(-values["hidden_size"] // 16) if rank == "auto" else positive(values, "mamba_dt_rank"),
        has_conv_bias=values["mamba_conv_bias"],
        has_bias=values["mamba_proj_bias"],
        has_inner_norms=True,
    )


class JambaLayer(DenseLayer):
    """A mixer and a gated MLP, or experts."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        name, width, inner = f"{layer}.{config.names.mlp}", config.hidden_size, config.intermediate_size
        experts = Experts(
            **separate_experts(f"{name}.experts", info.num_experts, hidden_size=width, intermediate_size=inner),
            num_experts=info.num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        router = FusedLinear(width, {f"{name}.router": info.num_experts}, is_precious=True)
        return MoeMlp(router, experts, route=softmax_then_top, num_chosen=config.num_experts_per_token)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Jamba without weights."""
    return Decoder(config, JambaLayer, dtype=dtype)
