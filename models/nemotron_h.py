"""Nemotron-H: Mamba-2, attention, an MLP or experts in each layer, one of them; attention knows no positions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.bamba import time_step_limit
from hybrid_engine.models.base import FULL, MAMBA2, MLP, LayerInfo, MambaInfo, Model
from hybrid_engine.models.config import DecoderConfig, Names, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder, DecoderLayer
from hybrid_engine.models.hybrid import MixerLayer, ResidualLayer
from hybrid_engine.models.jamba import experts_per_token
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.moe import Experts, GroupedSigmoid, MoeMlp
from hybrid_engine.models.layers.weight import Vector
from hybrid_engine.weights.parts import Part

DEFAULTS = {
    "vocab_size": 131_072,
    "hidden_size": 4096,
    "intermediate_size": 21_504,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": False,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "time_step_limit": (0.0, math.inf),
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
    "moe_latent_size": None,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
}
MOE = "moe"
LETTERS = {"M": MAMBA2, "*": FULL, "-": MLP, "E": MOE}
"""Of hybrid_override_pattern."""
KINDS = {"linear_attention": MAMBA2, "mamba": MAMBA2, "full_attention": FULL, "attention": FULL, "mlp": MLP, "moe": MOE}
"""Names in lists, new and old."""
NAMES = Names(
    embedding="backbone.embeddings",
    layers="backbone.layers",
    input_norm="norm",
    attention="mixer",
    mamba="mixer",
    mlp="mixer",
    final_norm="backbone.norm_f",
)


@dataclass(frozen=True)
class NemotronHConfig(DecoderConfig):
    """A decoder with experts that aren't gated."""

    latent_size: int | None = None
    """The width that experts work in, where it isn't the model's."""
    has_normed_routing: bool = True
    """Whether the weights of a token's experts are made to add up to 1 …"""
    routed_scale: float = 1.0
    """… before they are multiplied with this."""
    num_expert_groups: int = 1
    num_kept_expert_groups: int = 1


def resolve_nemotron_h(config: Mapping[str, Any]) -> NemotronHConfig:
    """One row a layer; those without a mixer keep nothing.

    Time steps are cut to time_step_limit, as the models were trained. transformers 5.24 cuts them to time_step_min
    instead, and that in a prompt alone, not in the tokens that follow.
    """
    old = {"head_dim": config["attention_head_dim"]} if "attention_head_dim" in config else {}
    values = with_defaults(old | dict(config), DEFAULTS)
    if values["mlp_hidden_act"] != "relu2":
        raise ConfigError(f"mlp_hidden_act is {values['mlp_hidden_act']!r}, must be 'relu2'")
    kinds = layer_kinds(values)
    num_experts = positive(values, "n_routed_experts") if MOE in kinds else 0
    values |= {
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": values["layer_norm_epsilon"],
        "hidden_act": "silu",  # of the recurrent layers
        "rope_theta": None,
        "rope_parameters": None,
    }
    base = resolve(values, tuple(MLP if kind == MOE else kind for kind in kinds), mamba=mamba2_info(values))
    settled = replace(
        base,
        layers=tuple(
            replace(layer, num_experts=num_experts) if kind == MOE else layer
            for layer, kind in zip(base.layers, kinds, strict=True)
        ),
        has_mlp_bias=values["mlp_bias"],
        has_float32_residual=values["residual_in_fp32"],
        num_experts_per_token=experts_per_token(values, num_experts),
        shared_intermediate_size=positive(values, "moe_shared_expert_intermediate_size"),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
        names=NAMES,
    )
    return NemotronHConfig(
        **vars(settled),
        latent_size=values["moe_latent_size"],
        has_normed_routing=values["norm_topk_prob"],
        routed_scale=values["routed_scaling_factor"],
        num_expert_groups=expert_groups(values, num_experts),
        num_kept_expert_groups=values["topk_group"],
    )


def layer_kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """Each layer's kind, from a list or from the older text of one letter a layer.

    Raises ConfigError when there is neither, when a name or letter isn't known or the number of layers differs.
    """
    found = values.get("layers_block_type") or values.get("layer_types")
    known: Mapping[str, str] = KINDS
    if found is None:
        found, known = values.get("hybrid_override_pattern"), LETTERS
    if not found:
        raise ConfigError("the model's config has neither layers_block_type nor hybrid_override_pattern: add one")
    if foreign := sorted(set(found) - known.keys()):
        raise ConfigError(f"the pattern of layers holds {', '.join(foreign)}; known here: {', '.join(known)}")
    num_layers = values.get("num_hidden_layers")
    if num_layers not in (None, len(found)):
        raise ConfigError(f"the pattern has {len(found)} layers, num_hidden_layers is {num_layers}: must be the same")
    return tuple(known[name] for name in found)


def mamba2_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent layers, as wide as their heads together."""
    num_heads = positive(values, "mamba_num_heads")
    return MambaInfo(
        inner_size=num_heads * positive(values, "mamba_head_dim"),
        state_size=positive(values, "ssm_state_size"),
        conv_width=positive(values, "conv_kernel"),
        num_heads=num_heads,
        num_groups=positive(values, "n_groups"),
        dt_limit=time_step_limit(values["time_step_limit"]),
        has_conv_bias=values["use_conv_bias"],
        has_bias=values["use_bias"],
    )


def expert_groups(values: Mapping[str, Any], num_experts: int) -> int:
    """Groups of experts to choose among. Raises ConfigError when experts or chosen groups don't fit them."""
    num_groups, num_kept = positive(values, "n_group"), positive(values, "topk_group")
    if num_experts % num_groups or num_kept > num_groups:
        raise ConfigError(
            f"n_group is {num_groups} and topk_group {num_kept}: n_group must divide the {num_experts} experts "
            "and be at least topk_group"
        )
    return num_groups


def squared_relu(x_TI: Tensor) -> Tensor:
    """relu(x)^2."""
    return x_TI.relu().square()


class SquaredMlp(nn.Module):
    """down(relu(up(x))^2)."""

    def __init__(self, name: str, intermediate_size: int, config: DecoderConfig) -> None:
        super().__init__()
        width, has_bias = config.hidden_size, config.has_mlp_bias
        self.up = FusedLinear(width, {f"{name}.up_proj": intermediate_size}, has_bias=has_bias)
        self.down = FusedLinear(intermediate_size, {f"{name}.down_proj": width}, has_bias=has_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        return self.down(squared_relu(self.up(x_TE)))


class SquaredExperts(Experts):
    """Experts without gates, in a latent space if the model has one."""

    def __init__(self, name: str, num_experts: int, config: NemotronHConfig) -> None:
        """name: of the whole block in the checkpoint."""
        width, inner = config.latent_size or config.hidden_size, config.expert_intermediate_size
        each = [f"{name}.experts.{expert}" for expert in range(num_experts)]
        super().__init__(
            gate_up=tuple(Part(f"{one}.up_proj.weight", (inner, width)) for one in each),
            down=tuple(Part(f"{one}.down_proj.weight", (width, inner)) for one in each),
            num_experts=num_experts,
            hidden_size=width,
            intermediate_size=inner,
            activation="relu2",
        )
        self.shapes["gate_up"] = (num_experts, inner, width)
        self.enter = self.leave = None
        if config.latent_size is not None:
            has_bias, outer = config.has_mlp_bias, config.hidden_size
            self.enter = FusedLinear(outer, {f"{name}.fc1_latent_proj": width}, has_bias=has_bias)
            self.leave = FusedLinear(width, {f"{name}.fc2_latent_proj": outer}, has_bias=has_bias)

    def activate(self, gate_up_XC: Tensor) -> Tensor:
        """relu(up)^2: [X, I]."""
        return squared_relu(gate_up_XC)

    def forward(self, x_TE: Tensor, weights_TC: Tensor, experts_TC: Tensor) -> Tensor:
        """[T, E], C experts a token."""
        if self.enter is None or self.leave is None:
            return super().forward(x_TE, weights_TC, experts_TC)
        return self.leave(super().forward(self.enter(x_TE), weights_TC, experts_TC))


class MlpOnlyLayer(ResidualLayer):
    """An MLP or experts, and nothing that mixes tokens."""

    def __init__(self, info: LayerInfo, config: NemotronHConfig) -> None:
        super().__init__(info, config)
        name = f"{config.names.layers}.{info.index}.{config.names.mlp}"
        self.info = info
        self.mlp = (
            make_moe(name, info, config) if info.num_experts else SquaredMlp(name, config.intermediate_size, config)
        )

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: None,
        cache: None,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed."""
        return self.close(self.mlp(x_TE), residual_TE, next_norm_E)

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        assert rows == (self.info,), (rows, self.info)


def make_moe(name: str, info: LayerInfo, config: NemotronHConfig) -> MoeMlp:
    """Experts and the MLP beside them. name: of the block in the checkpoint."""
    route = GroupedSigmoid(
        correction=Vector(f"{name}.gate.e_score_correction_bias", info.num_experts),
        num_groups=config.num_expert_groups,
        num_kept_groups=config.num_kept_expert_groups,
        is_normed=config.has_normed_routing,
        scale=config.routed_scale,
    )
    return MoeMlp(
        FusedLinear(config.hidden_size, {f"{name}.gate": info.num_experts}, is_precious=True),
        SquaredExperts(name, info.num_experts, config),
        route=route,
        num_chosen=config.num_experts_per_token,
        shared=SquaredMlp(f"{name}.shared_experts", config.shared_intermediate_size, config),
    )


def make_layer(info: LayerInfo, config: NemotronHConfig) -> DecoderLayer:
    """The layer of a row of the layer table."""
    return MlpOnlyLayer(info, config) if info.kind == MLP else MixerLayer(info, config)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Nemotron-H without weights."""
    return Decoder(config, make_layer, dtype=dtype)
