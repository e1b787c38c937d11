"""Qwen 3 Next and Qwen 3.5: gated delta nets with some gated attention layers, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import DELTA_NET, DeltaNetInfo, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, experts_per_token, hybrid_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer, Mixer
from hybrid_engine.models.layers.delta_net import DeltaNet, GroupedDeltaNet
from hybrid_engine.models.layers.gated_attention import GatedAttention
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.moe import Experts, MoeMlp, separate_experts, softmax_then_top, top_then_softmax

COMMON_DEFAULTS = {
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "hidden_act": "silu",
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "layer_types": None,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "bos_token_id": None,
    "eos_token_id": None,
}
EXPERT_DEFAULTS = {
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
QWEN3_NEXT_DEFAULTS = (
    COMMON_DEFAULTS
    | EXPERT_DEFAULTS
    | {
        "vocab_size": 151_936,
        "intermediate_size": 5632,
        "num_hidden_layers": 48,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": None,
    }
)
QWEN3_5_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 248_320,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_key_value_heads": 4,
}
QWEN3_5_MOE_DEFAULTS = (
    COMMON_DEFAULTS
    | EXPERT_DEFAULTS
    | {"vocab_size": 248_320, "num_hidden_layers": 40, "num_experts": 256, "num_experts_per_tok": 8}
)
UNNAMED = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.25, "full_attention_interval": 4}
"""Where a config is silent; no fields of transformers' config classes."""


@dataclass(frozen=True)
class QwenConfig(DecoderConfig):
    """What its router has of its own."""

    has_normed_weights: bool = True
    """Whether the weights of a token's experts are made to add up to 1."""


def resolve_qwen3_next(config: Mapping[str, Any]) -> DecoderConfig:
    """Experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    values = with_defaults(config, QWEN3_NEXT_DEFAULTS | UNNAMED)
    every, dense = positive(values, "decoder_sparse_step"), values["mlp_only_layers"] or ()
    base = with_experts(_resolve(values), values, lambda index: index not in dense and (index + 1) % every == 0)
    return QwenConfig(**vars(base), has_normed_weights=values["norm_topk_prob"])


def resolve_qwen3_5(config: Mapping[str, Any]) -> DecoderConfig:
    """A gated MLP in every layer."""
    return _resolve(with_defaults(config, QWEN3_5_DEFAULTS | UNNAMED))


def resolve_qwen3_5_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Experts in every layer."""
    values = with_defaults(config, QWEN3_5_MOE_DEFAULTS | UNNAMED)
    base = with_experts(_resolve(values | {"intermediate_size": values["moe_intermediate_size"]}), values)
    return QwenConfig(**vars(base))


def _resolve(values: Mapping[str, Any]) -> DecoderConfig:
    every = positive(values, "full_attention_interval")
    kinds = hybrid_kinds(values, recurrent=DELTA_NET, is_attention=lambda index: (index + 1) % every == 0)
    return replace(
        resolve(values, kinds, delta_net=delta_net_info(values)),
        has_qk_norm=True,
        has_zero_centered_norms=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )


def delta_net_info(values: Mapping[str, Any]) -> DeltaNetInfo:
    """The recurrent layers. Raises ConfigError when value heads can't share the key heads."""
    num_heads, num_groups = positive(values, "linear_num_value_heads"), positive(values, "linear_num_key_heads")
    if num_heads % num_groups:
        raise ConfigError(
            f"linear_num_value_heads is {num_heads}, must be a multiple of linear_num_key_heads ({num_groups})"
        )
    conv_width = positive(values, "linear_conv_kernel_dim")
    if conv_width < 2:
        raise ConfigError(f"linear_conv_kernel_dim is {conv_width}, must be at least 2: more than the token itself")
    return DeltaNetInfo(
        num_heads=num_heads,
        num_groups=num_groups,
        key_size=positive(values, "linear_key_head_dim"),
        value_size=positive(values, "linear_value_head_dim"),
        conv_width=conv_width,
    )


def with_experts(
    base: DecoderConfig, values: Mapping[str, Any], has_experts: Any = lambda index: True
) -> DecoderConfig:
    """The config with experts in the layers for which has_experts, asked by index, is true."""
    num_experts = positive(values, "num_experts")
    return replace(
        base,
        layers=tuple(
            replace(layer, num_experts=num_experts) if has_experts(layer.index) else layer for layer in base.layers
        ),
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
        shared_intermediate_size=positive(values, "shared_expert_intermediate_size"),
    )


class QwenLayer(DenseLayer):
    """A mixer and a gated MLP, or experts with a gated MLP beside them."""

    delta_net_class = DeltaNet

    def make_mixer(self, info: LayerInfo, config: DecoderConfig) -> Mixer:
        """What mixes the tokens."""
        layer, names = f"{config.names.layers}.{info.index}", config.names
        if info.kind == DELTA_NET:
            return self.delta_net_class(f"{layer}.{names.delta_net}", info, config)
        return GatedAttention(f"{layer}.{names.attention}", info, config)

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        assert isinstance(config, QwenConfig), type(config)
        name = f"{layer}.{config.names.mlp}"
        width, inner = config.hidden_size, config.expert_intermediate_size
        experts = Experts(
            **separate_experts(f"{name}.experts", info.num_experts, hidden_size=width, intermediate_size=inner),
            num_experts=info.num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        shared = GatedMlp(
            f"{name}.shared_expert",
            hidden_size=width,
            intermediate_size=config.shared_intermediate_size,
            activation=config.activation,
            has_bias=False,
        )
        return MoeMlp(
            FusedLinear(width, {f"{name}.gate": info.num_experts}, is_precious=True),
            experts,
            route=top_then_softmax if config.has_normed_weights else softmax_then_top,
            num_chosen=config.num_experts_per_token,
            shared=shared,
            shared_gate=FusedLinear(width, {f"{name}.shared_expert_gate": 1}, is_precious=True),
        )


class QwenNextLayer(QwenLayer):
    """The projections of delta nets stand group by group in the checkpoint."""

    delta_net_class = GroupedDeltaNet


def build_next(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Qwen 3 Next without weights."""
    return Decoder(config, QwenNextLayer, dtype=dtype)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Qwen 3.5 without weights."""
    return Decoder(config, QwenLayer, dtype=dtype)
