"""Plain decoders: Llama, Mistral, Ministral, Qwen 2 and Qwen 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import add_rms_norm
from hybrid_engine.models.base import FULL, SLIDING, LayerCache, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import AttentionLayer, Decoder
from hybrid_engine.models.layers.norm import Norm

COMMON_DEFAULTS = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}
LLAMA_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 32_000,
    "intermediate_size": 11_008,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "attention_bias": False,
    "mlp_bias": False,
}
MISTRAL_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 32_000,
    "intermediate_size": 14_336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "sliding_window": 4096,
}
MINISTRAL_DEFAULTS = MISTRAL_DEFAULTS | {"layer_types": None}
QWEN2_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 151_936,
    "intermediate_size": 22_016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
QWEN3_DEFAULTS = QWEN2_DEFAULTS | {"head_dim": 128, "attention_bias": False}


def resolve_llama(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention in every layer."""
    values = with_defaults(config, LLAMA_DEFAULTS)
    return replace(
        resolve(values, (FULL,) * positive(values, "num_hidden_layers")),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_mlp_bias=values["mlp_bias"],
    )


def resolve_mistral(config: Mapping[str, Any]) -> DecoderConfig:
    """One window for all layers, or none. As in transformers, `layer_types` has no say."""
    values = with_defaults(config, MISTRAL_DEFAULTS)
    kind = FULL if values["sliding_window"] is None else SLIDING
    return resolve(values, (kind,) * positive(values, "num_hidden_layers"))


def resolve_ministral(config: Mapping[str, Any]) -> DecoderConfig:
    """As Mistral, with a list that may mix windows and full layers."""
    values = with_defaults(config, MINISTRAL_DEFAULTS)
    num_layers = positive(values, "num_hidden_layers")
    kinds = (FULL if values["sliding_window"] is None else SLIDING,) * num_layers
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers)
    return resolve(values, kinds)


def resolve_qwen2(config: Mapping[str, Any]) -> DecoderConfig:
    """Biases on queries, keys and values."""
    values = with_defaults(config, QWEN2_DEFAULTS)
    return replace(resolve(values, _qwen_kinds(values)), has_qkv_bias=True)


def resolve_qwen3(config: Mapping[str, Any]) -> DecoderConfig:
    """Queries and keys are normed."""
    values = with_defaults(config, QWEN3_DEFAULTS)
    return replace(
        resolve(values, _qwen_kinds(values)),
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )


def _qwen_kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    num_layers = positive(values, "num_hidden_layers")
    if values.get("layer_types") is not None:
        return listed_kinds(values["layer_types"], num_layers)
    has_window = values["use_sliding_window"] and values["sliding_window"] is not None
    num_full = values["max_window_layers"] if has_window else num_layers
    return tuple(FULL if index < num_full else SLIDING for index in range(num_layers))


class LlamaLayer(AttentionLayer):
    """A norm before each sublayer."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        self.pre_mlp_norm = Norm(f"model.layers.{info.index}.post_attention_layernorm", config.hidden_size)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        cache: LayerCache,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]."""
        x_TE = self.attention(x_TE, table=table, meta=meta, cache=cache)
        x_TE, residual_TE = add_rms_norm(x_TE, residual_TE, self.pre_mlp_norm.weight_E, eps=self.eps)
        return add_rms_norm(self.mlp(x_TE), residual_TE, next_norm_E, eps=self.eps)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A plain decoder without weights."""
    return Decoder(config, LlamaLayer, dtype=dtype)
