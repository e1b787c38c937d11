"""Falcon-H1: attention and Mamba-2 side by side in every layer, and a factor on nearly everything."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.bamba import time_step_limit
from hybrid_engine.models.base import FULL, MAMBA2, LayerCache, LayerInfo, MambaInfo, Model, StateCache
from hybrid_engine.models.config import DecoderConfig, Names, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import MlpLayer
from hybrid_engine.models.layers.mamba2 import Mamba2Mixer
from hybrid_engine.models.layers.mlp import GatedMlp

DEFAULTS = {
    "vocab_size": 128_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "projectors_bias": False,
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": True,
    "time_step_limit": (0.0, math.inf),
    "embedding_multiplier": 1.0,
    "lm_head_multiplier": 1.0,
    "key_multiplier": 1.0,
    "attention_in_multiplier": 1.0,
    "attention_out_multiplier": 1.0,
    "ssm_in_multiplier": 1.0,
    "ssm_out_multiplier": 1.0,
    "ssm_multipliers": None,
    "mlp_multipliers": None,
}
NAMES = Names(pre_mlp_norm="pre_ff_layernorm", mlp="feed_forward", final_norm="model.final_layernorm")
LAYER_KIND = "hybrid"
"""What configs call its layers, all of them."""


@dataclass(frozen=True)
class FalconH1Config(DecoderConfig):
    """A decoder with a factor before and behind each of its parts."""

    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0
    mlp_gate: float = 1.0
    """Before the activation."""
    mlp_out: float = 1.0


def resolve_falcon_h1(config: Mapping[str, Any]) -> FalconH1Config:
    """Two rows a layer: attention, Mamba-2. A factor on the keys is one on the scores."""
    values = with_defaults(config, DEFAULTS)
    num_layers, mamba = positive(values, "num_hidden_layers"), mamba2_info(values)
    for key in ("layer_types", "layers_block_type"):
        if values.get(key) not in (None, [LAYER_KIND] * num_layers):
            raise ConfigError(f"{key} must be {LAYER_KIND!r} for each of the {num_layers} layers, or left out")
    base = resolve(values, (FULL,) * num_layers, mamba=mamba)
    mlp_gate, mlp_out = values["mlp_multipliers"] or (1.0, 1.0)
    settled = replace(
        base,
        layers=tuple(
            row
            for attention in base.layers
            for row in (attention, LayerInfo(index=attention.index, kind=MAMBA2, mamba=mamba))
        ),
        attention_scale=base.attention_scale * values["key_multiplier"],
        embedding_scale=float(values["embedding_multiplier"]),
        logits_divisor=1 / values["lm_head_multiplier"],
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        has_mlp_bias=values["mlp_bias"],
        names=NAMES,
    )
    return FalconH1Config(
        **vars(settled),
        attention_in=values["attention_in_multiplier"],
        attention_out=values["attention_out_multiplier"],
        mamba_in=values["ssm_in_multiplier"],
        mamba_out=values["ssm_out_multiplier"],
        mlp_gate=mlp_gate,
        mlp_out=mlp_out,
    )


def mamba2_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent half. Raises ConfigError when the heads don't make up the inner width."""
    inner_size = values["mamba_d_ssm"] or positive(values, "mamba_expand") * positive(values, "hidden_size")
    num_heads, head_size = positive(values, "mamba_n_heads"), values["mamba_d_head"]
    if inner_size % num_heads or head_size not in ("auto", None, inner_size // num_heads):
        raise ConfigError(
            f"mamba_n_heads is {num_heads} and mamba_d_head {head_size!r}: "
            f"their product must be mamba_d_ssm, or mamba_expand * hidden_size where that is null ({inner_size})"
        )
    return MambaInfo(
        inner_size=inner_size,
        state_size=positive(values, "mamba_d_state"),
        conv_width=positive(values, "mamba_d_conv"),
        num_heads=num_heads,
        num_groups=positive(values, "mamba_n_groups"),
        has_gated_norm=values["mamba_rms_norm"],
        is_normed_before_gate=values["mamba_norm_before_gate"],
        column_scales=tuple(values["ssm_multipliers"] or ()),
        dt_limit=time_step_limit(values["time_step_limit"]),
        has_conv_bias=values["mamba_conv_bias"],
        has_bias=values["mamba_proj_bias"],
        has_output_bias=values["projectors_bias"],
    )


class ScaledMlp(GatedMlp):
    """down(act(gate(x) * mlp_gate) * up(x)) * mlp_out."""

    def __init__(self, name: str, config: FalconH1Config) -> None:
        super().__init__(
            name,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
        )
        self.gate_factor, self.out_factor = config.mlp_gate, config.mlp_out
        self.intermediate_size = config.intermediate_size

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        gate_up_TC = self.gate_up(x_TE)
        gate_up_TC[:, : self.intermediate_size] *= self.gate_factor
        return self.down(act_mul(gate_up_TC, kind=self.activation)) * self.out_factor


class FalconH1Layer(MlpLayer):
    """Attention and Mamba-2 on the same normed input, their results added; then an MLP."""

    def __init__(self, attention: LayerInfo, mamba: LayerInfo, config: FalconH1Config) -> None:
        super().__init__(attention, config)
        self.mamba = Mamba2Mixer(f"{config.names.layers}.{mamba.index}.{config.names.mamba}", mamba, config)
        self.attention_in, self.attention_out = config.attention_in, config.attention_out
        self.mamba_in, self.mamba_out = config.mamba_in, config.mamba_out

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """The gated MLP with its factors."""
        assert isinstance(config, FalconH1Config), config
        return ScaledMlp(f"{layer}.{config.names.mlp}", config)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: Any,
        cache: Any,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed.

        meta, cache: the attention's, then Mamba-2's.
        """
        x_TE = self._mix_both(x_TE, table=table, metas=meta, caches=cache)
        x_TE, residual_TE = self.close(x_TE, residual_TE, self.pre_mlp_norm.weight_E)
        return self.close(self.mlp(x_TE), residual_TE, next_norm_E)

    def _mix_both(
        self,
        x_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        metas: tuple[AttentionMeta, StateMeta],
        caches: tuple[LayerCache, StateCache],
    ) -> Tensor:
        attended_TE = self.mix(x_TE * self.attention_in, table=table, meta=metas[0], cache=caches[0])
        scanned_TE = self.mamba(x_TE * self.mamba_in, meta=metas[1], cache=caches[1])
        return scanned_TE * self.mamba_out + attended_TE * self.attention_out

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its rows of the layer table say."""
        attention, mamba = rows
        self.mixer.check(attention)
        self.mamba.check(mamba)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Falcon-H1 without weights."""
    return Decoder(config, FalconH1Layer, dtype=dtype)
