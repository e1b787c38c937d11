"""RecurrentGemma (Griffin): real-gated linear recurrent units with some layers of windowed attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import RG_LRU, SLIDING, LayerInfo, Model, RgLruInfo
from hybrid_engine.models.config import DecoderConfig, Names, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import DenseLayer, Mixer
from hybrid_engine.models.layers.rg_lru import RgLruMixer

DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 2560,
    "intermediate_size": 7680,
    "num_hidden_layers": 26,
    "num_attention_heads": 10,
    "num_key_value_heads": None,
    "lru_width": None,
    "conv1d_width": 4,
    "attention_window_size": 2048,
    "logits_soft_cap": 30.0,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "block_types": ("recurrent", "recurrent", "attention"),
    "attention_bias": False,
    "eos_token_id": 1,
    "bos_token_id": 2,
    "tie_word_embeddings": True,
}
REACH_TOKENS = 2**20
"""It has no limit of its own; a request's book-keeping wants one."""
BLOCKS = {"recurrent": RG_LRU, "attention": SLIDING}
NAMES = Names(
    input_norm="temporal_pre_norm",
    attention="temporal_block",
    pre_mlp_norm="channel_pre_norm",
    mlp="mlp_block",
    final_norm="model.final_norm",
)


def resolve_recurrent_gemma(config: Mapping[str, Any]) -> DecoderConfig:
    """A few kinds of block over and over; half of a head turns; the config's MLP width is that of two halves."""
    values = with_defaults(config, DEFAULTS)
    ours = {"rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "max_position_embeddings": REACH_TOKENS}
    values = ours | values | {"sliding_window": positive(values, "attention_window_size")}
    base = resolve(values, layer_kinds(values), rg_lru=rg_lru_info(values))
    if base.activation != "gelu_tanh":
        raise ConfigError(f"hidden_activation is {values['hidden_activation']!r}, must be 'gelu_pytorch_tanh'")
    return replace(
        base,
        intermediate_size=base.intermediate_size // 2,
        # It was trained in bfloat16, and the factor stays what it was there.
        embedding_scale=torch.tensor(base.hidden_size**0.5, dtype=torch.bfloat16).item(),
        logits_softcap=values["logits_soft_cap"],
        has_qkv_bias=values["attention_bias"],
        has_output_bias=True,
        has_mlp_bias=True,
        has_zero_centered_norms=True,
        names=NAMES,
    )


def layer_kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Each layer's kind: a list where the config has one, else block_types over and over."""
    num_layers, blocks = positive(values, "num_hidden_layers"), values["block_types"]
    for key in ("layer_types", "layers_block_type"):
        if values.get(key) is not None:
            return listed_kinds(values[key], num_layers, known=(SLIDING, RG_LRU))
    if not blocks or not set(blocks) <= BLOCKS.keys():
        raise ConfigError(f"block_types is {blocks!r}, must be a list of {' and '.join(BLOCKS)}")
    return tuple(BLOCKS[blocks[index % len(blocks)]] for index in range(num_layers))


def rg_lru_info(values: Mapping[str, Any]) -> RgLruInfo:
    """The recurrent layers. Raises ConfigError when their channels can't be cut into as many blocks as heads."""
    channels = values["lru_width"] or positive(values, "hidden_size")
    num_blocks = positive(values, "num_attention_heads")
    if channels % num_blocks:
        raise ConfigError(f"lru_width is {channels}, must be a multiple of num_attention_heads ({num_blocks})")
    if positive(values, "conv1d_width") < 2:
        raise ConfigError("conv1d_width is 1, must be at least 2: a convolution sees more than its token")
    return RgLruInfo(channels, conv_width=values["conv1d_width"], num_blocks=num_blocks)


class GriffinLayer(DenseLayer):
    """A recurrent unit or attention, and a gated MLP."""

    def make_mixer(self, info: LayerInfo, config: DecoderConfig) -> Mixer:
        """What mixes the tokens."""
        if info.kind != RG_LRU:
            return super().make_mixer(info, config)
        return RgLruMixer(f"{config.names.layers}.{info.index}.{config.names.attention}", info, config)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A RecurrentGemma without weights."""
    return Decoder(config, GriffinLayer, dtype=dtype)
