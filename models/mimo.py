"""MiMo V2 Flash: windows with sinks and twice the kv heads, values smaller than keys, experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import FULL, SLIDING, LayerInfo, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    Names,
    experts_per_token,
    listed_kinds,
    positive,
    resolve,
    with_defaults,
)
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, GroupedSigmoid, MoeMlp, separate_experts
from hybrid_engine.models.layers.weight import Vector

MIMO_DEFAULTS = {
    "vocab_size": 152_576,
    "hidden_size": 4096,
    "intermediate_size": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 192,
    "v_head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "rope_theta": 5_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "partial_rotary_factor": 0.334,
    "attention_bias": False,
    "attention_value_scale": 0.707,
    "sliding_window": 129,
    "layer_types": None,
    "mlp_layer_types": None,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
}
NAMES = Names(sinks="attention_sink_bias")
DENSE, SPARSE = "dense", "sparse"
"""Names in mlp_layer_types."""


@dataclass(frozen=True)
class MimoConfig(DecoderConfig):
    """What its router has of its own."""

    num_expert_groups: int = 1
    num_kept_groups: int = 1
    has_normed_weights: bool = True
    routed_scale: float = 1.0


def resolve_mimo(config: Mapping[str, Any]) -> DecoderConfig:
    """Layer 0 and every sixth are full; the first MLP is dense, the others are experts."""
    values = with_defaults(config, MIMO_DEFAULTS)
    if values.get("sliding_window_size") is not None:  # of released checkpoints, the query itself not counted
        values["sliding_window"] = positive(values, "sliding_window_size") + 1
    num_layers = positive(values, "num_hidden_layers")
    kinds = tuple(FULL if index == 0 or (index + 1) % 6 == 0 else SLIDING for index in range(num_layers))
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers)
    mlps = values["mlp_layer_types"] or (DENSE, *(SPARSE,) * (num_layers - 1))
    if len(mlps) != num_layers or set(mlps) - {DENSE, SPARSE}:
        raise ConfigError(
            f"mlp_layer_types is {list(mlps)}, must be {DENSE} or {SPARSE} for each of {num_layers} layers"
        )
    num_experts = positive(values, "n_routed_experts")
    base = resolve(values, kinds)
    base = replace(
        base,
        layers=tuple(
            replace(_row(layer, values), num_experts=num_experts if mlps[layer.index] == SPARSE else 0)
            for layer in base.layers
        ),
        names=NAMES,
        value_scale=values["attention_value_scale"],
        has_qkv_bias=values["attention_bias"],
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
    )
    return MimoConfig(
        **vars(base),
        num_expert_groups=expert_groups(values, num_experts),
        num_kept_groups=positive(values, "topk_group"),
        has_normed_weights=values["norm_topk_prob"],
        routed_scale=values["routed_scaling_factor"] or 1.0,
    )


def _row(layer: LayerInfo, values: Mapping[str, Any]) -> LayerInfo:
    layer = replace(layer, v_head_size=positive(values, "v_head_dim"))
    if layer.kind == FULL:
        return layer
    num_kv_heads = 2 * layer.num_kv_heads
    if layer.num_heads % num_kv_heads:
        raise ConfigError(
            f"num_attention_heads is {layer.num_heads}, must be a multiple of twice num_key_value_heads "
            f"({num_kv_heads}), which layers with a window have"
        )
    return replace(layer, num_kv_heads=num_kv_heads, has_sinks=True)


def expert_groups(values: Mapping[str, Any], num_experts: int) -> int:
    """How many groups the experts stand in. Raises ConfigError when they can't, or too many groups are to be kept."""
    num_groups = positive(values, "n_group")
    if num_experts % num_groups or positive(values, "topk_group") > num_groups:
        raise ConfigError(
            f"n_group is {num_groups} and topk_group {values['topk_group']}: {num_experts} experts must be a multiple "
            f"of the first, and the second at most that"
        )
    return num_groups


class MimoLayer(DenseLayer):
    """Attention and a gated MLP, or experts."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        assert isinstance(config, MimoConfig), type(config)
        name = f"{layer}.{config.names.mlp}"
        width, inner = config.hidden_size, config.expert_intermediate_size
        experts = Experts(
            **separate_experts(f"{name}.experts", info.num_experts, hidden_size=width, intermediate_size=inner),
            num_experts=info.num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        route = GroupedSigmoid(
            Vector(f"{name}.gate.e_score_correction_bias", info.num_experts),
            num_groups=config.num_expert_groups,
            num_kept_groups=config.num_kept_groups,
            is_normed=config.has_normed_weights,
            scale=config.routed_scale,
        )
        router = FusedLinear(width, {f"{name}.gate": info.num_experts}, is_precious=True)
        return MoeMlp(router, experts, route=route, num_chosen=config.num_experts_per_token)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A MiMo without weights."""
    return Decoder(config, MimoLayer, dtype=dtype)
