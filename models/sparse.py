"""Mixtral and Qwen 3 with experts: plain decoders in which a router chooses each token's MLPs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.models.base import FULL, SLIDING, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, Names, experts_per_token, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, MoeMlp, separate_experts, softmax_then_top, top_then_softmax

COMMON_DEFAULTS = {
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
MIXTRAL_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": None,
    "rope_theta": 1_000_000.0,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_MOE_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "bos_token_id": None,
    "eos_token_id": None,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "decoder_sparse_step": 1,
    "mlp_only_layers": None,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
}
MIXTRAL_NAMES = Names(mlp_gate_up=("w1", "w3"), mlp_down="w2")


@dataclass(frozen=True)
class SparseConfig(DecoderConfig):
    """How its routers weigh."""

    has_normed_weights: bool = True
    """Whether the weights of a token's experts add up to 1."""


def resolve_mixtral(config: Mapping[str, Any]) -> DecoderConfig:
    """Experts in every layer; one window for all of them, or none."""
    values = with_defaults(config, MIXTRAL_DEFAULTS)
    kind = FULL if values["sliding_window"] is None else SLIDING
    base = resolve(values, (kind,) * positive(values, "num_hidden_layers"))
    num_experts = positive(values, "num_local_experts")
    base = replace(
        base,
        layers=tuple(replace(layer, num_experts=num_experts) for layer in base.layers),
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=base.intermediate_size,
        names=MIXTRAL_NAMES,
    )
    return SparseConfig(**vars(base))


def resolve_qwen3_moe(config: Mapping[str, Any]) -> DecoderConfig:
    """Queries and keys are normed; experts in every decoder_sparse_step-th layer but those of mlp_only_layers."""
    new = {"num_experts": config["num_local_experts"]} if "num_local_experts" in config else {}
    values = with_defaults({**config, **new}, QWEN3_MOE_DEFAULTS)
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    base = resolve(values, (SLIDING if has_window else FULL,) * positive(values, "num_hidden_layers"))
    every, dense = positive(values, "decoder_sparse_step"), values["mlp_only_layers"] or ()
    num_experts = positive(values, "num_experts")
    base = replace(
        base,
        layers=tuple(
            replace(layer, num_experts=num_experts)
            if layer.index not in dense and (layer.index + 1) % every == 0
            else layer
            for layer in base.layers
        ),
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )
    return SparseConfig(**vars(base), has_normed_weights=values["norm_topk_prob"])


class SparseLayer(DenseLayer):
    """Attention and a gated MLP, or experts."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        assert isinstance(config, SparseConfig), type(config)
        name, names = f"{layer}.{config.names.mlp}", config.names
        width, inner = config.hidden_size, config.expert_intermediate_size
        gate, up = names.mlp_gate_up
        parts = separate_experts(
            f"{name}.experts",
            info.num_experts,
            hidden_size=width,
            intermediate_size=inner,
            gate_up=(gate, up),
            down=names.mlp_down,
        )
        experts = Experts(
            **parts,
            num_experts=info.num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        return MoeMlp(
            FusedLinear(width, {f"{name}.gate": info.num_experts}, is_precious=True),
            experts,
            route=top_then_softmax if config.has_normed_weights else softmax_then_top,
            num_chosen=config.num_experts_per_token,
        )


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A decoder with experts, without weights."""
    return Decoder(config, SparseLayer, dtype=dtype)
