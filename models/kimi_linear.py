"""Kimi Linear: Kimi Delta Attention, some layers of latent attention that know no positions, experts in most layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.base import DELTA_NET, FULL, DeltaNetInfo, LatentInfo, LayerInfo, Model
from hybrid_engine.models.config import (
    DecoderConfig,
    Names,
    experts_per_token,
    listed_kinds,
    positive,
    resolve,
    with_defaults,
)
from hybrid_engine.models.decoder import Decoder
from hybrid_engine.models.fields import INDEX
from hybrid_engine.models.hybrid import DenseLayer, Mixer
from hybrid_engine.models.layers.delta_net import KimiDeltaNet
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.moe import Experts, GroupedSigmoid, MoeMlp, separate_experts
from hybrid_engine.models.layers.weight import Vector
from hybrid_engine.models.mimo import DENSE, SPARSE, expert_groups

DEFAULTS = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "bos_token_id": 163_584,
    "eos_token_id": 163_586,
    "layer_types": None,
    "mlp_layer_types": None,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_local_experts": 256,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
UNNAMED = {"first_k_dense_replace": 1, "mla_use_nope": True, "moe_router_activation_func": "sigmoid"}
"""Where a config is silent; no fields of transformers' config class."""
OTHER_NAMES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
"""What checkpoints call some fields, and what transformers does."""
NESTED_NAMES = {
    "head_dim": "linear_head_dim",
    "num_heads": "linear_num_heads",
    "short_conv_kernel_size": "linear_conv_kernel_dim",
}
"""Fields that checkpoints keep in linear_attn_config."""
NAMES = Names(delta_net="self_attn")


@dataclass(frozen=True)
class KimiConfig(DecoderConfig):
    """What its router has of its own."""

    route: GroupedSigmoid = field(default_factory=GroupedSigmoid)
    """How experts are chosen, but for each layer's correction."""


def resolve_kimi_linear(config: Mapping[str, Any]) -> DecoderConfig:
    """Layers from lists that count from one, from a list of kinds, or every fourth attending from the fifth on."""
    values = {OTHER_NAMES.get(key, key): value for key, value in config.items()}
    nested = values.get("linear_attn_config")
    nested = nested if isinstance(nested, Mapping) else {}
    values |= {ours: nested[theirs] for theirs, ours in NESTED_NAMES.items() if theirs in nested}
    values = with_defaults(values, DEFAULTS | UNNAMED) | {"rope_theta": None, "rope_parameters": None}
    check_supported(values)
    kinds = kinds_of_layers(values, nested)
    latent = latent_info(values)
    # One kv head: the latent and what the heads share of their keys.
    heads = {"num_key_value_heads": 1, "head_dim": latent.latent_size + latent.shared_size}
    base = resolve({**values, **heads}, kinds, delta_net=delta_net_info(values))
    num_experts = positive(values, "num_local_experts")
    experts = [num_experts if kind == SPARSE else 0 for kind in mlp_kinds(values)]
    layers = (
        replace(layer, num_experts=experts[layer.index])
        if layer.kind == DELTA_NET
        else replace(layer, num_experts=experts[layer.index], latent=latent, v_head_size=0)
        for layer in base.layers
    )
    base = replace(
        base,
        layers=tuple(layers),
        attention_scale=(latent.own_size + latent.shared_size) ** -0.5,
        has_qkv_bias=values["attention_bias"],
        has_output_bias=values["attention_bias"],
        num_experts_per_token=experts_per_token(values, num_experts),
        expert_intermediate_size=positive(values, "moe_intermediate_size"),
        shared_intermediate_size=positive(values, "moe_intermediate_size") * positive(values, "n_shared_experts"),
        names=NAMES,
    )
    route = GroupedSigmoid(
        num_groups=expert_groups(values, num_experts),
        num_kept_groups=positive(values, "topk_group"),
        is_normed=values["norm_topk_prob"],
        scale=values["routed_scaling_factor"] or 1.0,
    )
    return KimiConfig(**vars(base), route=route)


def check_supported(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for what no published Kimi Linear asks for."""
    if not values["mla_use_nope"]:
        raise ConfigError("mla_use_nope is false: latent attention that turns keys isn't supported here")
    if values["moe_router_activation_func"] != "sigmoid":
        found = values["moe_router_activation_func"]
        raise ConfigError(f"moe_router_activation_func is {found!r}, must be 'sigmoid'")


def kinds_of_layers(values: Mapping[str, Any], nested: Mapping[str, Any]) -> tuple[str, ...]:
    """Each layer's kind. Raises ConfigError when linear_attn_config's lists don't name each layer once."""
    num_layers = positive(values, "num_hidden_layers")
    if values["layer_types"] is not None:
        return listed_kinds(values["layer_types"], num_layers, known=(FULL, DELTA_NET))
    full, delta = nested.get("full_attn_layers"), nested.get("kda_layers")
    if full is None or delta is None:
        return tuple(FULL if index and index % 4 == 0 else DELTA_NET for index in range(num_layers))
    if not all(INDEX.listed().holds(one) for one in (full, delta)) or sorted([*full, *delta]) != list(
        range(1, num_layers + 1)
    ):
        raise ConfigError(
            f"full_attn_layers and kda_layers are {full} and {delta}, must name each layer from 1 to {num_layers} once"
        )
    return tuple(FULL if number in full else DELTA_NET for number in range(1, num_layers + 1))


def mlp_kinds(values: Mapping[str, Any]) -> tuple[str, ...]:
    """DENSE or SPARSE for each layer. Raises ConfigError when a list says something else."""
    num_layers = positive(values, "num_hidden_layers")
    if values["mlp_layer_types"] is None:
        return tuple(DENSE if index < values["first_k_dense_replace"] else SPARSE for index in range(num_layers))
    kinds = tuple(values["mlp_layer_types"])
    if len(kinds) != num_layers or set(kinds) - {DENSE, SPARSE}:
        raise ConfigError(
            f"mlp_layer_types is {list(kinds)}, must be {DENSE} or {SPARSE} for each of {num_layers} layers"
        )
    return kinds


def delta_net_info(values: Mapping[str, Any]) -> DeltaNetInfo:
    """The recurrent layers: as many heads for keys as for values, of one size."""
    conv_width = positive(values, "linear_conv_kernel_dim")
    if conv_width < 2:
        raise ConfigError(f"linear_conv_kernel_dim is {conv_width}, must be at least 2: more than the token itself")
    num_heads, size = positive(values, "linear_num_heads"), positive(values, "linear_head_dim")
    return DeltaNetInfo(num_heads, num_heads, size, size, conv_width, has_row_decays=True)


def latent_info(values: Mapping[str, Any]) -> LatentInfo:
    """The attention layers."""
    return LatentInfo(
        latent_size=positive(values, "kv_lora_rank"),
        shared_size=positive(values, "qk_rope_head_dim"),
        own_size=positive(values, "qk_nope_head_dim"),
        value_size=positive(values, "v_head_dim"),
        query_rank=values["q_lora_rank"],
    )


class KimiLayer(DenseLayer):
    """A mixer and a gated MLP, or experts with a gated MLP beside them."""

    def make_mixer(self, info: LayerInfo, config: DecoderConfig) -> Mixer:
        """What mixes the tokens."""
        if info.kind == DELTA_NET:
            return KimiDeltaNet(f"{config.names.layers}.{info.index}.{config.names.delta_net}", info, config)
        return super().make_mixer(info, config)

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP, or the experts that this row of the layer table has."""
        if not info.num_experts:
            return super().make_mlp(layer, info, config)
        assert isinstance(config, KimiConfig), type(config)
        name, width, inner = f"{layer}.{config.names.mlp}", config.hidden_size, config.expert_intermediate_size
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
        shared = GatedMlp(
            f"{name}.shared_experts",
            hidden_size=width,
            intermediate_size=config.shared_intermediate_size,
            activation=config.activation,
            has_bias=False,
        )
        correction = Vector(f"{name}.gate.e_score_correction_bias", info.num_experts)
        return MoeMlp(
            FusedLinear(width, {f"{name}.gate": info.num_experts}, is_precious=True),
            experts,
            route=replace(config.route, correction=correction),
            num_chosen=config.num_experts_per_token,
            shared=shared,
        )


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Kimi Linear without weights."""
    return Decoder(config, KimiLayer, dtype=dtype)
