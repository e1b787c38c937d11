"""MiniMax: lightning attention with some layers of full attention, experts everywhere."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.base import FULL, LIGHTNING, SLIDING, LayerCache, LayerInfo, LightningInfo, Model, StateCache
from hybrid_engine.models.config import DecoderConfig, experts_per_token, listed_kinds, positive, resolve, with_defaults
from hybrid_engine.models.decoder import DecoderLayer
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.lightning import LightningAttention
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, MoeMlp, separate_experts, top_then_softmax
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.stream import StreamDecoder

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": None,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "sliding_window": None,
    "layer_types": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "full_attn_alpha_factor": 1,
    "full_attn_beta_factor": 1,
    "linear_attn_alpha_factor": 1,
    "linear_attn_beta_factor": 1,
    "mlp_alpha_factor": 1,
    "mlp_beta_factor": 1,
}
UNNAMED = {"rope_theta": 1_000_000.0, "rotary_dim": None}
"""Where a config is silent; no fields of transformers' config class."""


@dataclass(frozen=True)
class MiniMaxConfig(DecoderConfig):
    """How a sublayer's output is added to its normed input: (what the input is multiplied with, and the output)."""

    full_factors: tuple[float, float] = (1.0, 1.0)
    lightning_factors: tuple[float, float] = (1.0, 1.0)
    mlp_factors: tuple[float, float] = (1.0, 1.0)


def resolve_minimax(config: Mapping[str, Any]) -> DecoderConfig:
    """Full attention and lightning in turn unless a list says otherwise.

    rotary_dim, where a config has it, says how many elements of a head turn, as in the authors' own code; transformers
    doesn't read it.
    """
    values = with_defaults(config, DEFAULTS | UNNAMED)
    num_layers = positive(values, "num_hidden_layers")
    kinds = tuple(LIGHTNING if index % 2 else FULL for index in range(num_layers))
    if values["layer_types"] is not None:
        kinds = listed_kinds(values["layer_types"], num_layers, known=(FULL, LIGHTNING))
    if values["sliding_window"] is not None:
        kinds = tuple(SLIDING if kind == FULL else kind for kind in kinds)
    num_heads = positive(values, "num_attention_heads")
    head_size = values["head_dim"] or positive(values, "hidden_size") // num_heads
    if values["rotary_dim"] is not None:
        if values["rotary_dim"] > head_size:
            raise ConfigError(f"rotary_dim is {values['rotary_dim']}, must be at most head_dim ({head_size})")
        values["partial_rotary_factor"] = values["rotary_dim"] / head_size
    num_experts = positive(values, "num_local_experts")
    base = resolve(values, kinds, lightning=LightningInfo(num_heads, head_size))
    base = replace(
        base,
        layers=tuple(replace(layer, num_experts=num_experts) for layer in base.layers),
        num_experts_per_token=experts_per_token(values, num_experts),
    )
    return MiniMaxConfig(
        **vars(base),
        full_factors=factors(values, "full_attn"),
        lightning_factors=factors(values, "linear_attn"),
        mlp_factors=factors(values, "mlp"),
    )


def factors(values: Mapping[str, Any], name: str) -> tuple[float, float]:
    """Of a sublayer's input and output."""
    return values[f"{name}_alpha_factor"], values[f"{name}_beta_factor"]


class MiniMaxLayer(DecoderLayer):
    """Attention of either kind and experts; what is norm'd before a sublayer is also what its output is added to."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert isinstance(config, MiniMaxConfig), type(config)
        layer, names = f"{config.names.layers}.{info.index}", config.names
        self.eps = config.norm_eps
        self.input_norm = Norm(f"{layer}.{names.input_norm}", config.hidden_size)
        self.pre_mlp_norm = Norm(f"{layer}.{names.pre_mlp_norm}", config.hidden_size)
        name = f"{layer}.{names.attention}"
        self.mixer: Attention | LightningAttention
        if info.kind == LIGHTNING:
            self.mixer, self.factors = LightningAttention(name, info, config), config.lightning_factors
        else:
            self.mixer, self.factors = Attention(name, info, config), config.full_factors
        self.mlp, self.mlp_factors = make_experts(f"{layer}.{names.mlp}", info, config), config.mlp_factors

    def forward(
        self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: Any, cache: LayerCache | StateCache
    ) -> Tensor:
        """The residual stream behind this layer, [T, E]."""
        x_TE = rms_norm(x_TE, self.input_norm.weight_E, eps=self.eps)
        if isinstance(self.mixer, LightningAttention):
            assert isinstance(cache, StateCache), type(cache)
            mixed_TE = self.mixer(x_TE, meta=meta, cache=cache)
        else:
            assert isinstance(cache, LayerCache), type(cache)
            mixed_TE = self.mixer(x_TE, table=table, meta=meta, cache=cache)
        x_TE = x_TE * self.factors[0] + mixed_TE * self.factors[1]
        x_TE = rms_norm(x_TE, self.pre_mlp_norm.weight_E, eps=self.eps)
        return x_TE * self.mlp_factors[0] + self.mlp(x_TE) * self.mlp_factors[1]

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.mixer.check(*rows)


def make_experts(name: str, info: LayerInfo, config: DecoderConfig) -> MoeMlp:
    """A router and its experts."""
    width, inner = config.hidden_size, config.intermediate_size
    parts = separate_experts(
        f"{name}.experts",
        info.num_experts,
        hidden_size=width,
        intermediate_size=inner,
        gate_up=("w1", "w3"),
        down="w2",
    )
    experts = Experts(
        **parts,
        num_experts=info.num_experts,
        hidden_size=width,
        intermediate_size=inner,
        activation=config.activation,
    )
    router = FusedLinear(width, {f"{name}.gate": info.num_experts}, is_precious=True)
    return MoeMlp(router, experts, route=top_then_softmax, num_chosen=config.num_experts_per_token)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A MiniMax without weights."""
    return StreamDecoder(config, MiniMaxLayer, dtype=dtype)
