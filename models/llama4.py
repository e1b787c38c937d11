"""The text model of Llama 4: layers that see their chunk, and layers without positions that see everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.attention import AttentionMeta, write_kv
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.rope import apply_rope
from hybrid_engine.models.base import CHUNKED, FULL, LayerCache, LayerInfo, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    Names,
    experts_per_token,
    listed_kinds,
    positive,
    resolve,
    with_defaults,
    with_interleaved_rope,
)
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer, Mixer
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.moe import Experts, MoeMlp, top_then_sigmoid
from hybrid_engine.models.layers.rope import NO_ROPE
from hybrid_engine.weights.parts import Part

LLAMA4_DEFAULTS = {
    "vocab_size": 202_048,
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16_384,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "rope_theta": 500_000.0,
    "attention_bias": False,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "moe_layers": None,
    "interleave_moe_layer_step": 1,
    "use_qk_norm": True,
    "no_rope_layers": None,
    "no_rope_layer_interval": 4,
    "attention_chunk_size": 8192,
    "layer_types": None,
    "attn_temperature_tuning": True,
    "floor_scale": 8192,
    "attn_scale": 0.1,
}
NAMES = Names(mlp="feed_forward")


@dataclass(frozen=True)
class Llama4Config(DecoderConfig):
    """What its attention has of its own."""

    is_qk_normed: bool = True
    """Whether queries and keys are normed, without a weight, once they are turned; only where they turn."""
    temperature_step: int | None = None
    """Without positions, queries grow with the logarithm of how many times this their position is; None: they don't."""
    temperature_scale: float = 0.0


def resolve_llama4(config: Mapping[str, Any]) -> DecoderConfig:
    """Chunks and rope in all layers but every fourth, or as the lists say; experts in every so many layers."""
    values = with_defaults(config, LLAMA4_DEFAULTS)
    num_layers = positive(values, "num_hidden_layers")
    turns = turning_layers(values, num_layers)
    has_chunks = values["attention_chunk_size"] is not None
    kinds = tuple(CHUNKED if has_chunks and is_turning else FULL for is_turning in turns)
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, CHUNKED))
    every = positive(values, "interleave_moe_layer_step")
    sparse = range(every - 1, num_layers, every) if values["moe_layers"] is None else values["moe_layers"]
    num_experts = positive(values, "num_local_experts")
    base = resolve(values, kinds)
    rows = tuple(
        replace(
            layer,
            rope=layer.rope if turns[layer.index] else NO_ROPE,
            num_experts=num_experts if layer.index in sparse else 0,
        )
        for layer in base.layers
    )
    base = replace(
        base,
        layers=rows,
        intermediate_size=positive(values, "intermediate_size_mlp"),
        expert_intermediate_size=positive(values, "intermediate_size"),
        num_experts_per_token=experts_per_token(values, num_experts),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        names=NAMES,
    )
    return Llama4Config(
        **vars(with_interleaved_rope(base)),
        is_qk_normed=values["use_qk_norm"],
        temperature_step=positive(values, "floor_scale") if values["attn_temperature_tuning"] else None,
        temperature_scale=values["attn_scale"],
    )


def turning_layers(values: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    """For each layer, whether it knows positions: the config's list has 1 where it does, whatever its name says."""
    listed = values["no_rope_layers"]
    if not listed:
        every = positive(values, "no_rope_layer_interval")
        return tuple((index + 1) % every != 0 for index in range(num_layers))
    if len(listed) < num_layers:
        raise ConfigError(
            f"no_rope_layers has {len(listed)} entries, must have one for each of the {num_layers} layers"
        )
    return tuple(map(bool, listed[:num_layers]))


class Llama4Attention(Attention):
    """Heads are normed after they are turned; without positions, later queries are larger."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(name, info, config)
        assert isinstance(config, Llama4Config), type(config)
        has_rope = info.rope.rotary_size > 0
        self.is_normed = config.is_qk_normed and has_rope
        self.temperature_step = None if has_rope else config.temperature_step
        self.temperature_scale = config.temperature_scale

    def write(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Write the tokens' keys and values into the cache: their queries, [T, H, D]."""
        num_heads = [self.info.num_heads, self.info.num_kv_heads, self.info.num_kv_heads]
        q_THD, k_TKD, v_TKD = self.qkv(x_TE).unflatten(1, (-1, self.info.head_size)).split(num_heads, 1)
        if table[0].shape[1]:
            q_THD, k_TKD = apply_rope(q_THD, k_TKD, cos_TD=table[0], sin_TD=table[1])
        if self.is_normed:
            ones_D = torch.ones(self.info.head_size, device=x_TE.device)
            q_THD, k_TKD = rms_norm(q_THD, ones_D, eps=self.eps), rms_norm(k_TKD, ones_D, eps=self.eps)
        if self.temperature_step is not None:
            steps_T = ((meta.positions() + 1) / self.temperature_step).floor()
            growth_T = 1 + self.temperature_scale * steps_T.log1p()
            q_THD = (q_THD * growth_T[:, None, None]).to(x_TE.dtype)
        write_kv(k_TKD, v_TKD, k_cache_BKPD=cache.k_BKPD, v_cache_BKPD=cache.v_BKPD, slots_T=meta.slots_T)
        return q_THD


class Llama4Layer(DenseLayer):
    """Attention and a gated MLP, or experts with one beside them."""

    def make_mixer(self, info: LayerInfo, config: DecoderConfig) -> Mixer:
        """Attention of its own."""
        return Llama4Attention(f"{config.names.layers}.{info.index}.{config.names.attention}", info, config)

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or this row's experts, whose matrices the checkpoint has turned."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        name, num_experts = f"{layer}.{config.names.mlp}", info.num_experts
        width, inner = config.hidden_size, config.expert_intermediate_size
        experts = Experts(
            gate_up=(Part.transposed(f"{name}.experts.gate_up_proj", (num_experts, 2 * inner, width)),),
            down=(Part.transposed(f"{name}.experts.down_proj", (num_experts, width, inner)),),
            num_experts=num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
            weighs_inputs=True,
        )
        shared = GatedMlp(
            f"{name}.shared_expert",
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
            has_bias=False,
        )
        return MoeMlp(
            FusedLinear(width, {f"{name}.router": num_experts}, is_precious=True),
            experts,
            route=top_then_sigmoid,
            num_chosen=config.num_experts_per_token,
            shared=shared,
        )


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Llama 4 without weights."""
    return Decoder(config, Llama4Layer, dtype=dtype)
