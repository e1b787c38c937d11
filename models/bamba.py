"""Bamba and GraniteMoeHybrid (Granite 4): Mamba-2 layers and some attention layers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import MAMBA2, LayerInfo, MambaInfo, Model
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
from hybrid_engine.models.hybrid import DenseLayer, MlpLayer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.moe import Experts, MoeMlp, top_then_softmax
from hybrid_engine.weights.parts import Part

COMMON_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "time_step_limit": (0.0, math.inf),
}
BAMBA_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 128_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 262_144,
    "attn_layer_indices": None,
    "mlp_bias": False,
}
GRANITE_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "num_key_value_heads": None,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "embedding_multiplier": 1.0,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "attention_multiplier": 1.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
    "position_embedding_type": None,
}
BAMBA_NAMES = Names(pre_mlp_norm="pre_ff_layernorm", mlp="feed_forward", final_norm="model.final_layernorm")


def resolve_bamba(config: Mapping[str, Any]) -> DecoderConfig:
    """Attention where attn_layer_indices says so; half of each head turns."""
    values = with_defaults(config, BAMBA_DEFAULTS) | {"partial_rotary_factor": 0.5}
    indices = values["attn_layer_indices"] or ()
    kinds = hybrid_kinds(values, recurrent=MAMBA2, is_attention=lambda index: index in indices)
    return replace(
        resolve(values, kinds, mamba=mamba2_info(values)),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_mlp_bias=values["mlp_bias"],
        names=BAMBA_NAMES,
    )


def resolve_granite(config: Mapping[str, Any]) -> DecoderConfig:
    """Four multipliers; an MLP for every token, with experts beside it or alone; rope only where asked for."""
    values = with_defaults(config, GRANITE_DEFAULTS)
    if values["position_embedding_type"] != "rope":
        values |= {"rope_theta": None, "rope_parameters": None}
    kinds = hybrid_kinds(values, recurrent=MAMBA2, is_attention=lambda index: False)
    num_experts = values["num_local_experts"] or 0
    base = resolve(values, kinds, mamba=mamba2_info(values))
    return replace(
        base,
        layers=tuple(replace(layer, num_experts=num_experts) for layer in base.layers),
        attention_scale=values["attention_multiplier"],
        embedding_scale=factor(values, "embedding_multiplier"),
        residual_scale=factor(values, "residual_multiplier"),
        logits_divisor=factor(values, "logits_scaling"),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        num_experts_per_token=experts_per_token(values, num_experts),
        shared_intermediate_size=positive(values, "shared_intermediate_size"),
    )


def factor(values: Mapping[str, Any], key: str) -> float | None:
    """A factor from a config; None where it changes nothing."""
    return None if values[key] == 1 else float(values[key])


def mamba2_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent layers. Raises ConfigError when the heads don't make up the inner width."""
    inner_size = positive(values, "mamba_expand") * positive(values, "hidden_size")
    num_heads, head_size = positive(values, "mamba_n_heads"), values["mamba_d_head"]
    if inner_size % num_heads or head_size not in ("auto", None, inner_size // num_heads):
        raise ConfigError(
            f"mamba_n_heads is {num_heads} and mamba_d_head {head_size!r}: "
            f"their product must be mamba_expand * hidden_size ({inner_size})"
        )
    return MambaInfo(
        inner_size=inner_size,
        state_size=positive(values, "mamba_d_state"),
        conv_width=positive(values, "mamba_d_conv"),
        num_heads=num_heads,
        num_groups=positive(values, "mamba_n_groups"),
        dt_limit=time_step_limit(values["time_step_limit"]),
        has_conv_bias=values["mamba_conv_bias"],
        has_bias=values["mamba_proj_bias"],
    )


def time_step_limit(limit: list[Any] | tuple[Any, ...] | None) -> tuple[float, float]:
    """(least, largest) time step; transformers writes infinity as an object, since JSON has no word for it."""
    if limit is None:
        return (0.0, math.inf)
    low, high = (float(end["__float__"]) if isinstance(end, dict) else float(end) for end in limit)
    return (low, high)


class GraniteMlp(nn.Module):
    """An MLP for every token, and experts beside it where there are any."""

    def __init__(self, layer: str, info: LayerInfo, config: DecoderConfig) -> None:
        """layer: the layer's name in the checkpoint."""
        super().__init__()
        self.shared = GatedMlp(
            f"{layer}.shared_mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.shared_intermediate_size,
            activation=config.activation,
            has_bias=False,
            gate_up=("input_linear",),
            down="output_linear",
        )
        self.moe = self._make_moe(f"{layer}.block_sparse_moe", info, config) if info.num_experts else None

    def _make_moe(self, name: str, info: LayerInfo, config: DecoderConfig) -> MoeMlp:
        num_experts, width, inner = info.num_experts, config.hidden_size, config.intermediate_size
        experts = Experts(
            gate_up=(Part(f"{name}.input_linear.weight", (num_experts, 2 * inner, width)),),
            down=(Part(f"{name}.output_linear.weight", (num_experts, width, inner)),),
            num_experts=num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        router = FusedLinear(width, {f"{name}.router.layer": num_experts}, is_precious=True)
        return MoeMlp(router, experts, route=top_then_softmax, num_chosen=config.num_experts_per_token)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        shared_TE = self.shared(x_TE)
        return shared_TE if self.moe is None else self.moe(x_TE) + shared_TE


class GraniteLayer(MlpLayer):
    """A mixer and Granite's MLPs."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """The MLP for every token, with the experts that this row of the layer table has."""
        return GraniteMlp(layer, info, config)


def build_bamba(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Bamba without weights."""
    return Decoder(config, DenseLayer, dtype=dtype)


def build_granite(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A GraniteMoeHybrid without weights."""
    return Decoder(config, GraniteLayer, dtype=dtype)
