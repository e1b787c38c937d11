"""Lfm2 and Lfm3: short convolutions with some attention layers, in Lfm3 of two kinds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import norm_add_norm
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.base import (
    FULL,
    SHORT_CONV,
    SLIDING,
    LayerCache,
    LayerInfo,
    Model,
    ShortConvInfo,
    StateCache,
)
from hybrid_engine.models.config import DecoderConfig, Names, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer
from hybrid_engine.models.layers.norm import Norm

COMMON_DEFAULTS = {
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "conv_bias": False,
    "layer_types": None,
    "rope_parameters": None,
}
LFM2_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 65_536,
    "hidden_size": 2560,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "conv_L_cache": 3,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
    "full_attn_idxs": None,
}
LFM3_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 128_000,
    "hidden_size": 2048,
    "intermediate_size": 7680,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "bos_token_id": 124_894,
    "eos_token_id": 124_900,
    "conv_L_cache": 7,
    "sliding_window": 256,
    "use_sandwich_norm": True,
    "use_attention_gate": True,
    "attention_bias": False,
}
LFM3_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    FULL: {"rope_type": "proportional", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
}
THETA = 1_000_000.0
"""Where a config names no base."""
LFM3_NAMES = Names(
    input_norm="operator_norm",
    pre_mlp_norm="ffn_norm",
    mlp="feed_forward",
    mlp_gate_up=("w1", "w3"),
    mlp_down="w2",
    final_norm="model.embedding_norm",
)
LFM2_NAMES = replace(LFM3_NAMES, attention_out="out_proj", q_norm="q_layernorm", k_norm="k_layernorm")
LFM2_OLD_KEYS = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
"""What the first checkpoints call some fields; they have the last word, as in transformers."""


def resolve_lfm2(config: Mapping[str, Any]) -> DecoderConfig:
    """Attention where full_attn_idxs or a list says so; the MLP's width is adjusted unless the config says not to."""
    old = {new: config[key] for key, new in LFM2_OLD_KEYS.items() if key in config}
    values = with_defaults(dict(config) | old, LFM2_DEFAULTS | {"rope_theta": THETA})
    num_layers = positive(values, "num_hidden_layers")
    full = range(num_layers) if values["full_attn_idxs"] is None else values["full_attn_idxs"]
    kinds = tuple(FULL if index in full else SHORT_CONV for index in range(num_layers))
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, SHORT_CONV))
    return replace(resolve_lfm(values | {"intermediate_size": mlp_width(values)}, kinds), names=LFM2_NAMES)


def mlp_width(values: Mapping[str, Any]) -> int:
    """The inner width of Lfm2's MLPs: two thirds of what the config says, rounded up to a multiple."""
    width = positive(values, "intermediate_size")
    if not values["block_auto_adjust_ff_dim"]:
        return width
    multiple = positive(values, "block_multiple_of")
    return -(-int(values["block_ffn_dim_multiplier"] * int(2 * width / 3)) // multiple) * multiple


def resolve_lfm3(config: Mapping[str, Any]) -> DecoderConfig:
    """Three kinds of memory; heads are gated and sublayers normed before and after, unless the config says not to."""
    values = with_defaults(config, LFM3_DEFAULTS | {"rope_theta": THETA})
    values["rope_parameters"] = values["rope_parameters"] or LFM3_ROPE
    num_layers = positive(values, "num_hidden_layers")
    kinds = tuple(_lfm3_kind(index) for index in range(num_layers))
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, SLIDING, SHORT_CONV))
    return replace(
        resolve_lfm(values, kinds),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_attention_gate=values["use_attention_gate"],
        has_sandwich_norms=values["use_sandwich_norm"],
        names=LFM3_NAMES,
    )


def _lfm3_kind(index: int) -> str:
    if index % 4 == 2:
        return FULL
    return SLIDING if index % 4 == 0 and index > 0 else SHORT_CONV


def resolve_lfm(values: Mapping[str, Any], kinds: tuple[str, ...]) -> DecoderConfig:
    """What all Lfms have in common."""
    conv_width = positive(values, "conv_L_cache")
    if conv_width < 2:
        raise ConfigError(f"conv_L_cache is {conv_width}, must be at least 2: a convolution sees more than its token")
    short_conv = ShortConvInfo(
        num_conv_channels=positive(values, "hidden_size"),
        conv_width=conv_width,
        has_bias=values["conv_bias"],
    )
    values = {**values, "rms_norm_eps": values["norm_eps"], "hidden_act": "silu"}
    return replace(resolve(values, kinds, short_conv=short_conv), has_qk_norm=True)


class SandwichLayer(DenseLayer):
    """A mixer and a gated MLP, a norm before and after each."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        layer = f"{config.names.layers}.{info.index}"
        self.post_mixer_norm = Norm(f"{layer}.post_operator_norm", config.hidden_size)
        self.post_mlp_norm = Norm(f"{layer}.post_ffn_norm", config.hidden_size)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta | StateMeta,
        cache: LayerCache | StateCache,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed."""
        x_TE = self.mix(x_TE, table=table, meta=meta, cache=cache)
        x_TE, residual_TE = self._close(x_TE, residual_TE, self.post_mixer_norm.weight_E, self.pre_mlp_norm.weight_E)
        return self._close(self.mlp(x_TE), residual_TE, self.post_mlp_norm.weight_E, next_norm_E)

    def _close(self, x_TE: Tensor, residual_TE: Tensor, post_E: Tensor, pre_E: Tensor) -> tuple[Tensor, Tensor]:
        return norm_add_norm(x_TE, residual_TE, post_weight_E=post_E, pre_weight_E=pre_E, eps=self.eps)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """An Lfm without weights."""
    return Decoder(config, SandwichLayer if config.has_sandwich_norms else DenseLayer, dtype=dtype)
