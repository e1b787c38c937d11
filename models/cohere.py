"""Cohere 2 (Command R7B, Command A): attention and MLP beside each other, full layers that know no positions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.models.base import FULL, LayerCache, LayerInfo, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    kinds_of,
    resolve,
    with_defaults,
    with_interleaved_rope,
    without_rope,
)
from hybrid_engine.models.layers.norm import Norm, layer_norm
from hybrid_engine.models.stream import StreamDecoder, StreamLayer

COHERE2_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 8192,
    "intermediate_size": 22_528,
    "logit_scale": 0.0625,
    "num_hidden_layers": 40,
    "num_attention_heads": 64,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "bos_token_id": 5,
    "eos_token_id": 255_001,
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "attention_bias": False,
    "sliding_window": 4096,
    "layer_types": None,
}


def resolve_cohere2(config: Mapping[str, Any]) -> DecoderConfig:
    """Every fourth layer is full and without rope; scores are multiplied with a factor."""
    values = with_defaults(config, COHERE2_DEFAULTS)
    values |= {"rms_norm_eps": values["layer_norm_eps"], "head_dim": None}
    base = resolve(values, kinds_of(values, default_pattern=4))
    return replace(
        with_interleaved_rope(without_rope(base, FULL)),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        logits_divisor=1 / values["logit_scale"],
    )


class Cohere2Layer(StreamLayer):
    """One norm, and both sublayers behind it."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        self.input_norm = Norm(f"{config.names.layers}.{info.index}.input_layernorm", config.hidden_size)

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """The residual stream behind this layer, [T, E]."""
        normed_TE = layer_norm(x_TE, self.input_norm.weight_E, eps=self.eps)
        return x_TE + self.attention(normed_TE, table=table, meta=meta, cache=cache) + self.mlp(normed_TE)


class Cohere2(StreamDecoder):
    """Its norms take the mean off."""

    def norm_last(self, x_TE: Tensor) -> Tensor:
        """The final norm."""
        return layer_norm(x_TE, self.final_norm.weight_E, eps=self.config.norm_eps)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Cohere 2 without weights."""
    return Cohere2(config, Cohere2Layer, dtype=dtype)
