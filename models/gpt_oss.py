"""GPT-OSS: windows and full layers in turn, sinks, experts with biases and a clamped activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act
from hybrid_engine.models.base import LayerInfo, Model
from hybrid_engine.models.config import DecoderConfig, experts_per_token, kinds_of, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.hybrid import MlpLayer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, MoeMlp, top_then_softmax
from hybrid_engine.weights.parts import Part

GPT_OSS_DEFAULTS = {
    "vocab_size": 201_088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "layer_types": None,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}
ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""Where a config has none."""


@dataclass(frozen=True)
class GptOssConfig(DecoderConfig):
    """Two numbers more."""

    swiglu_alpha: float = 0.0
    swiglu_limit: float = 0.0


def resolve_gpt_oss(config: Mapping[str, Any]) -> DecoderConfig:
    """Every second layer is full; all have sinks and experts."""
    values = with_defaults(config, GPT_OSS_DEFAULTS)
    if values.get("rope_parameters") is None and values.get("rope_scaling") is None:
        values["rope_scaling"] = ROPE
    num_experts = positive(values, "num_local_experts")
    base = resolve(values, kinds_of(values, default_pattern=2))
    base = replace(
        base,
        layers=tuple(replace(layer, has_sinks=True, num_experts=num_experts) for layer in base.layers),
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        num_experts_per_token=experts_per_token(values, num_experts),
    )
    return GptOssConfig(**vars(base), swiglu_alpha=values["swiglu_alpha"], swiglu_limit=values["swiglu_limit"])


class GptOssExperts(Experts):
    """The gate is clamped above, up on both sides, and one is added to up."""

    alpha: float
    limit: float

    def activate(self, gate_up_XC: Tensor) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1): [X, I]."""
        gate_XI, up_XI = gate_up_XC.float().chunk(2, 1)
        gate_XI, up_XI = gate_XI.clamp(max=self.limit), up_XI.clamp(-self.limit, self.limit)
        return (gate_XI * act(self.alpha * gate_XI, kind="sigmoid") * (up_XI + 1)).to(gate_up_XC.dtype)


class GptOssLayer(MlpLayer):
    """Attention and experts."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """The experts. The checkpoint has gate and up in turn, and matrices turned."""
        assert isinstance(config, GptOssConfig), type(config)
        name, num_experts = f"{layer}.mlp", info.num_experts
        width, inner = config.hidden_size, config.intermediate_size
        experts = GptOssExperts(
            gate_up=(Part.transposed(f"{name}.experts.gate_up_proj", (num_experts, 2 * inner, width), gate_before_up),),
            down=(Part.transposed(f"{name}.experts.down_proj", (num_experts, width, inner)),),
            gate_up_bias=Part(f"{name}.experts.gate_up_proj_bias", (num_experts, 2 * inner), change=gate_before_up),
            down_bias=Part(f"{name}.experts.down_proj_bias", (num_experts, width)),
            num_experts=num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation=config.activation,
        )
        experts.alpha, experts.limit = config.swiglu_alpha, config.swiglu_limit
        router = FusedLinear(width, {f"{name}.router": num_experts}, has_bias=True, is_precious=True)
        return MoeMlp(router, experts, route=top_then_softmax, num_chosen=config.num_experts_per_token)


def gate_before_up(tensor_XC: Tensor) -> Tensor:
    """Bring the second dimension from gate and up in turn to all of gate, then all of up."""
    return tensor_XC.unflatten(1, (-1, 2)).transpose(1, 2).flatten(1, 2)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A GPT-OSS without weights."""
    return Decoder(config, GptOssLayer, dtype=dtype)
