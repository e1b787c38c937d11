"""Lfm2 with experts: dense MLPs in the first layers, experts chosen by sigmoids in all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import FULL, SHORT_CONV, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, listed_kinds, positive, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.jamba import experts_per_token
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, GroupedSigmoid, MoeMlp, separate_experts
from hybrid_engine.models.layers.weight import Vector
from hybrid_engine.models.lfm import COMMON_DEFAULTS, LFM2_NAMES, THETA, resolve_lfm

DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 65_536,
    "hidden_size": 2048,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "conv_L_cache": 3,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}


@dataclass(frozen=True)
class LfmMoeConfig(DecoderConfig):
    """An Lfm with experts."""

    has_expert_bias: bool = True
    """Whether a learned number is added to each expert's score when experts are chosen."""
    has_normed_routing: bool = True
    """Whether the weights of a token's experts are made to add up to 1 …"""
    routed_scale: float = 1.0
    """… before they are multiplied with this."""


def resolve_lfm2_moe(config: Mapping[str, Any]) -> LfmMoeConfig:
    """Experts from num_dense_layers on. Raises ConfigError where there is no list of layers."""
    old = {"tie_word_embeddings": config["tie_embedding"]} if "tie_embedding" in config else {}
    values = with_defaults(dict(config) | old, DEFAULTS | {"rope_theta": THETA})
    if values["layer_types"] is None:
        raise ConfigError(f"layer_types is missing, must list each layer as {FULL} or {SHORT_CONV}")
    kinds = listed_kinds(values["layer_types"], positive(values, "num_hidden_layers"), known=(FULL, SHORT_CONV))
    base = resolve_lfm(values, kinds)
    num_experts = positive(values, "num_experts")
    layers = tuple(
        replace(layer, num_experts=0 if layer.index < values["num_dense_layers"] else num_experts)
        for layer in base.layers
    )
    settled = replace(
        base,
        layers=layers,
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
        names=LFM2_NAMES,
    )
    return LfmMoeConfig(
        **vars(settled),
        has_expert_bias=values["use_expert_bias"],
        has_normed_routing=values["norm_topk_prob"],
        routed_scale=values["routed_scaling_factor"],
    )


class LfmMoeLayer(DenseLayer):
    """A mixer and a gated MLP, or experts."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        assert isinstance(config, LfmMoeConfig), config
        name, sizes = f"{layer}.{config.names.mlp}", (config.hidden_size, config.expert_intermediate_size)
        experts = Experts(
            **separate_experts(
                f"{name}.experts",
                info.num_experts,
                hidden_size=sizes[0],
                intermediate_size=sizes[1],
                gate_up=("w1", "w3"),
                down="w2",
            ),
            num_experts=info.num_experts,
            hidden_size=sizes[0],
            intermediate_size=sizes[1],
            activation=config.activation,
        )
        route = GroupedSigmoid(
            correction=Vector(f"{name}.expert_bias", info.num_experts) if config.has_expert_bias else None,
            is_normed=config.has_normed_routing,
            scale=config.routed_scale,
            norm_eps=1e-6,
        )
        router = FusedLinear(config.hidden_size, {f"{name}.gate": info.num_experts}, is_precious=True)
        return MoeMlp(router, experts, route=route, num_chosen=config.num_experts_per_token)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """An Lfm2 with experts, without weights."""
    return Decoder(config, LfmMoeLayer, dtype=dtype)
