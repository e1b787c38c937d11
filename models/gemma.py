"""Gemma 2 and the text model of Gemma 3."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import norm_add_norm
from hybrid_engine.models.base import LayerCache, LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, kinds_of, resolve, with_defaults
from hybrid_engine.models.decoder import AttentionLayer, Decoder
from hybrid_engine.models.layers.norm import Norm

COMMON_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
GEMMA2_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
GEMMA3_DEFAULTS = COMMON_DEFAULTS | {
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "final_logit_softcapping": None,
}


def resolve_gemma2(config: Mapping[str, Any]) -> DecoderConfig:
    """Sliding and full layers in turn, scores and logits soft-capped."""
    values = with_defaults(config, GEMMA2_DEFAULTS)
    base = _resolve(values, default_pattern=2)
    return replace(base, attention_softcap=values["attn_logit_softcapping"])


def resolve_gemma3(config: Mapping[str, Any]) -> DecoderConfig:
    """Five sliding layers to a full one, each kind with its own rope; queries and keys are normed."""
    values = with_defaults(config, GEMMA3_DEFAULTS)
    if values.get("use_bidirectional_attention"):
        raise ConfigError("use_bidirectional_attention is true: an embedding model, which doesn't generate text")
    return replace(_resolve(values, default_pattern=6), has_qk_norm=True)


def _resolve(values: Mapping[str, Any], *, default_pattern: int) -> DecoderConfig:
    return replace(
        resolve(values, kinds_of(values, default_pattern=default_pattern)),
        attention_scale=values["query_pre_attn_scalar"] ** -0.5,
        logits_softcap=values["final_logit_softcapping"],
        embedding_scale=values["hidden_size"] ** 0.5,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_zero_centered_norms=True,
    )


class GemmaLayer(AttentionLayer):
    """Norms before and after each sublayer."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        name = f"model.layers.{info.index}"
        self.post_attention_norm = Norm(f"{name}.post_attention_layernorm", config.hidden_size)
        self.pre_mlp_norm = Norm(f"{name}.pre_feedforward_layernorm", config.hidden_size)
        self.post_mlp_norm = Norm(f"{name}.post_feedforward_layernorm", config.hidden_size)

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
        x_TE, residual_TE = self._close(
            x_TE, residual_TE, self.post_attention_norm.weight_E, self.pre_mlp_norm.weight_E
        )
        return self._close(self.mlp(x_TE), residual_TE, self.post_mlp_norm.weight_E, next_norm_E)

    def _close(self, x_TE: Tensor, residual_TE: Tensor, post_E: Tensor, pre_E: Tensor) -> tuple[Tensor, Tensor]:
        """End a sublayer: norm its output, add it, norm the sum for the next one."""
        return norm_add_norm(
            x_TE,
            residual_TE,
            post_weight_E=post_E,
            pre_weight_E=pre_E,
            eps=self.eps,
            zero_centered=self.is_zero_centered,
        )


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Gemma without weights."""
    return Decoder(config, GemmaLayer, dtype=dtype)
