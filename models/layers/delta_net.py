"""Gated delta nets: a short convolution over queries, keys and values, the gated delta rule, a gated norm."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.ssm import StateMeta, gated_delta_rule, gated_rms_norm
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mamba import Conv
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

if TYPE_CHECKING:
    from hybrid_engine.models.base import DeltaNetInfo, LayerInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig


class Decays(WeightModule):
    """How fast the state of a head fades, in float32."""

    A_H: Tensor
    """As it multiplies a step: negative."""
    dt_bias_HN: Tensor
    """[H, 1], or [H, N] where each row of the state has its own."""

    def __init__(self, name: str, info: DeltaNetInfo, *, A_shape: tuple[int, ...] | None = None) -> None:
        """A_shape: as the checkpoint has it, if it isn't [H]."""
        super().__init__()
        self.shape = (info.num_heads, info.key_size if info.has_row_decays else 1)
        self.weights = (
            Weight("A_H", (Part(f"{name}.A_log", A_shape or (info.num_heads,)),), is_float32=True),
            Weight("dt_bias_HN", (Part(f"{name}.dt_bias", (math.prod(self.shape),)),), is_float32=True),
        )

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; checkpoints hold the logarithm of -A."""
        if weight.attribute == "A_H":
            self.A_H = -torch.exp(tensor.flatten())
        else:
            self.dt_bias_HN = tensor.view(self.shape)


class HeadNorm(WeightModule):
    """The weight of a norm over each head, repeated for every head."""

    weight_I: Tensor

    def __init__(self, name: str, *, num_heads: int, head_size: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.weights = (Weight("weight_I", (Part(f"{name}.weight", (head_size,)),), is_float32=True),)

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Repeat it."""
        self.weight_I = tensor.repeat(self.num_heads)


class DeltaNet(nn.Module):
    """Project, convolve, apply the rule, norm and gate, project back.

    The projection's columns, whatever tensors of a checkpoint they come from: gates [H * D], queries and keys
    [G * N] each, values [H * D], what becomes beta and time steps [H] each.
    """

    gate_activation = "silu"
    norm_name, out_name = "norm", "out_proj"

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.delta_net is not None, info
        assert config.activation == "silu", config.activation
        self.info, self.delta_net = info, info.delta_net
        self.eps = config.norm_eps if self.delta_net.norm_eps is None else self.delta_net.norm_eps
        net, width = self.delta_net, config.hidden_size
        self.in_proj = self.make_in_proj(name, config)
        self.column_sizes = [net.value_columns, net.num_conv_channels, net.num_heads, net.num_heads]
        self.conv = self.make_conv(name)
        self.decays = Decays(name, net)
        self.norm = HeadNorm(f"{name}.{self.norm_name}", num_heads=net.num_heads, head_size=net.value_size)
        self.out_proj = FusedLinear(net.value_columns, {f"{name}.{self.out_name}": width})

    def make_in_proj(self, name: str, config: DecoderConfig) -> FusedLinear:
        """All that is projected from the layer's input."""
        net = self.delta_net
        names = {
            f"{name}.in_proj_z": net.value_columns,
            f"{name}.in_proj_qkv": net.num_conv_channels,
            f"{name}.in_proj_b": net.num_heads,
            f"{name}.in_proj_a": net.num_heads,
        }
        return FusedLinear(config.hidden_size, names)

    def make_conv(self, name: str) -> Conv:
        """The convolution."""
        return Conv(f"{name}.conv1d", self.delta_net)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        gate_TI, qkv_TC, b_TH, dt_TH = self.in_proj(x_TE).split(self.column_sizes, 1)
        return self.mix(gate_TI, qkv_TC, b_TH, dt_TH[:, :, None], meta=meta, cache=cache)

    def mix(
        self, gate_TI: Tensor, qkv_TC: Tensor, b_TH: Tensor, dt_THN: Tensor, *, meta: StateMeta, cache: StateCache
    ) -> Tensor:
        """What follows the projections."""
        net = self.delta_net
        qkv_TC = self.conv(qkv_TC, meta=meta, conv_SIW=cache.conv_SIW)
        q_TC, k_TC, v_TC = qkv_TC.split([net.key_columns, net.key_columns, net.value_columns], 1)
        out_THD = gated_delta_rule(
            q_TC.unflatten(1, (net.num_groups, net.key_size)),
            k_TC.unflatten(1, (net.num_groups, net.key_size)),
            v_TC.unflatten(1, (net.num_heads, net.value_size)),
            dt_THN=dt_THN,
            b_TH=b_TH,
            A_H=self.decays.A_H,
            dt_bias_HN=self.decays.dt_bias_HN,
            beta_scale=net.beta_scale,
            state_SHND=cache.ssm_S,
            meta=meta,
        )
        normed_TI = gated_rms_norm(
            out_THD.flatten(1),
            gate_TI,
            self.norm.weight_I,
            eps=self.eps,
            group_size=net.value_size,
            norm_before_gate=True,
            activation=self.gate_activation,
        )
        return self.out_proj(normed_TI)

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.conv.weight_IW.shape == (self.delta_net.num_conv_channels, self.delta_net.conv_width), info
        assert self.decays.A_H.shape == (self.delta_net.num_heads,), (self.decays.A_H.shape, info)


class GroupedDeltaNet(DeltaNet):
    """The checkpoint has the projections' columns group by group (Qwen 3 Next)."""

    def make_in_proj(self, name: str, config: DecoderConfig) -> FusedLinear:
        """All that is projected from the layer's input."""
        net = self.delta_net
        per_group = net.value_columns // net.num_groups
        columns = {
            f"{name}.in_proj_qkvz": (net.key_size, net.key_size, per_group, per_group),
            f"{name}.in_proj_ba": (net.num_heads // net.num_groups,) * 2,
        }
        orders = {f"{name}.in_proj_qkvz": (3, 0, 1, 2), f"{name}.in_proj_ba": (0, 1)}
        sizes = {one: net.num_groups * sum(parts) for one, parts in columns.items()}
        changes = {one: partial(ungroup, sizes=parts, order=orders[one]) for one, parts in columns.items()}
        return FusedLinear(config.hidden_size, sizes, changes=changes)


class SplitConv(Conv):
    """Queries, keys and values each have a convolution of their own in the checkpoint."""

    def __init__(self, name: str, info: DeltaNetInfo) -> None:
        super().__init__(name, info)
        columns = {"q": info.key_columns, "k": info.key_columns, "v": info.value_columns}
        parts = tuple(Part(f"{name}.{one}_conv1d.weight", (n, 1, info.conv_width)) for one, n in columns.items())
        self.weights = (Weight("weight_IW", parts, is_float32=True),)


class SplitDeltaNet(DeltaNet):
    """Every projection is a tensor of its own (Olmo)."""

    norm_name, out_name = "o_norm", "o_proj"

    def make_in_proj(self, name: str, config: DecoderConfig) -> FusedLinear:
        """All that is projected from the layer's input."""
        net = self.delta_net
        keys, values, heads = net.key_columns, net.value_columns, net.num_heads
        columns = {"g": values, "q": keys, "k": keys, "v": values, "b": heads, "a": heads}
        return FusedLinear(config.hidden_size, {f"{name}.{one}_proj": size for one, size in columns.items()})

    def make_conv(self, name: str) -> Conv:
        """The convolution."""
        return SplitConv(name, self.delta_net)


class KimiDeltaNet(SplitDeltaNet):
    """Each row of a state decays by itself; steps and gates are projected through a narrow width (Kimi Linear)."""

    gate_activation = "sigmoid"

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(name, info, config)
        net = self.delta_net
        rank = net.key_size
        self.column_sizes = [net.num_conv_channels, net.num_heads, rank, rank]
        self.step_proj = FusedLinear(rank, {f"{name}.f_b_proj": net.num_heads * net.key_size}, is_precious=True)
        self.gate_proj = FusedLinear(rank, {f"{name}.g_b_proj": net.value_columns})
        self.decays = Decays(name, net, A_shape=(1, 1, net.num_heads, 1))

    def make_in_proj(self, name: str, config: DecoderConfig) -> FusedLinear:
        """All that is projected from the layer's input."""
        net = self.delta_net
        keys, values, rank = net.key_columns, net.value_columns, net.key_size
        columns = {"q": keys, "k": keys, "v": values, "b": net.num_heads, "f_a": rank, "g_a": rank}
        return FusedLinear(config.hidden_size, {f"{name}.{one}_proj": size for one, size in columns.items()})

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        qkv_TC, b_TH, steps_TR, gates_TR = self.in_proj(x_TE).split(self.column_sizes, 1)
        dt_THN = self.step_proj(steps_TR).unflatten(1, (self.delta_net.num_heads, -1))
        return self.mix(self.gate_proj(gates_TR), qkv_TC, b_TH, dt_THN, meta=meta, cache=cache)


def ungroup(weight_NK: Tensor, sizes: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Bring rows that stand group by group to stand part by part.

    sizes: rows of each part in a group. order: the parts, as they are to come.
    """
    parts = weight_NK.unflatten(0, (-1, sum(sizes))).split(list(sizes), 1)
    return torch.cat([parts[part].flatten(0, 1) for part in order])
