"""Olmo hybrids: gated delta nets with norms before their sublayers, attention layers with norms behind them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.base import DELTA_NET, FULL, LayerInfo, Model, StateCache
from hybrid_engine.models.config import DecoderConfig, listed_kinds, positive, resolve, with_defaults, without_rope
from hybrid_engine.models.decoder import DecoderLayer
from hybrid_engine.models.layers.delta_net import SplitDeltaNet
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.olmo import Olmo3Layer
from hybrid_engine.models.qwen_next import delta_net_info
from hybrid_engine.models.stream import StreamDecoder

DEFAULTS = {
    "vocab_size": 100_352,
    "hidden_size": 3840,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 30,
    "num_key_value_heads": None,
    "hidden_act": "silu",
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "layer_types": None,
    "bos_token_id": None,
    "eos_token_id": 100_257,
    "linear_num_key_heads": None,
    "linear_num_value_heads": None,
    "linear_key_head_dim": None,
    "linear_value_head_dim": None,
    "linear_conv_kernel_dim": 4,
    "linear_allow_neg_eigval": True,
}
THETA = 10_000.0
"""Where a config names no base. Released checkpoints say that there is none: nothing turns then."""
NORM_EPS = 1e-5
"""Of the norm behind the delta rule, whatever the others have."""


def resolve_olmo_hybrid(config: Mapping[str, Any]) -> DecoderConfig:
    """Every fourth layer attends unless a list says otherwise."""
    values = with_defaults(config, DEFAULTS | {"rope_theta": THETA})
    num_layers = positive(values, "num_hidden_layers")
    kinds = tuple(FULL if index % 4 == 3 else DELTA_NET for index in range(num_layers))
    if FULL not in kinds:
        kinds = (*kinds[:-1], FULL)
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, DELTA_NET))
    net = replace(
        delta_net_info(with_head_sizes(values)),
        beta_scale=2.0 if values["linear_allow_neg_eigval"] else 1.0,
        norm_eps=NORM_EPS,
    )
    base = replace(
        resolve(values, kinds, delta_net=net),
        has_qk_norm=True,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
    )
    rope = values.get("rope_parameters") or {}
    says_none = "rope_theta" in rope and rope["rope_theta"] is None
    return without_rope(base, FULL) if says_none else base


def with_head_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values in which delta nets have as many heads as attention, and three quarters of the width in keys."""
    num_heads = positive(values, "num_attention_heads")
    num_groups = values["linear_num_key_heads"] or num_heads
    key_size = values["linear_key_head_dim"] or int(0.75 * positive(values, "hidden_size") / num_groups)
    sizes = {
        "linear_num_key_heads": num_groups,
        "linear_num_value_heads": values["linear_num_value_heads"] or num_heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": values["linear_value_head_dim"] or 2 * key_size,
    }
    return {**values, **sizes}


class OlmoDeltaLayer(DecoderLayer):
    """A gated delta net and a gated MLP, a norm before each."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        layer, names = f"{config.names.layers}.{info.index}", config.names
        self.eps = config.norm_eps
        self.input_norm = Norm(f"{layer}.{names.input_norm}", config.hidden_size)
        self.mixer = SplitDeltaNet(f"{layer}.{names.delta_net}", info, config)
        self.pre_mlp_norm = Norm(f"{layer}.{names.pre_mlp_norm}", config.hidden_size)
        self.mlp = GatedMlp(
            f"{layer}.{names.mlp}",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
        )

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: StateMeta, cache: StateCache) -> Tensor:
        """The residual stream behind this layer, [T, E]."""
        normed_TE = rms_norm(x_TE, self.input_norm.weight_E, eps=self.eps)
        x_TE = x_TE + self.mixer(normed_TE, meta=meta, cache=cache)
        return x_TE + self.mlp(rms_norm(x_TE, self.pre_mlp_norm.weight_E, eps=self.eps))

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.mixer.check(*rows)


def make_layer(info: LayerInfo, config: DecoderConfig) -> DecoderLayer:
    """A layer of this row's kind."""
    return OlmoDeltaLayer(info, config) if info.kind == DELTA_NET else Olmo3Layer(info, config)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """An Olmo hybrid without weights."""
    return StreamDecoder(config, make_layer, dtype=dtype)
