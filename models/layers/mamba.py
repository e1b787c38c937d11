"""The Mamba-1 mixer: a causal convolution and a selective scan, gated."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.ssm import StateMeta, causal_conv1d, mamba1_scan
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm, PlainNorm
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

if TYPE_CHECKING:
    from hybrid_engine.models.base import DeltaNetInfo, LayerInfo, MambaInfo, RgLruInfo, ShortConvInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig


class Conv(WeightModule):
    """The weights of a causal convolution over each channel, in float32."""

    weight_IW: Tensor
    bias_I: Tensor | None

    def __init__(
        self, name: str, info: MambaInfo | ShortConvInfo | DeltaNetInfo | RgLruInfo, *, activation: str | None = "silu"
    ) -> None:
        super().__init__()
        channels = info.num_conv_channels
        self.activation = activation
        self.bias_I = None
        weight = Weight("weight_IW", (Part(f"{name}.weight", (channels, 1, info.conv_width)),), is_float32=True)
        bias = Weight("bias_I", (Part(f"{name}.bias", (channels,)),), is_float32=True)
        self.weights = (weight, bias) if info.has_conv_bias else (weight,)

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; the filter without the dimension of size 1 that torch's convolutions want."""
        setattr(self, weight.attribute, tensor.squeeze(1) if weight.attribute == "weight_IW" else tensor)

    def forward(self, x_TI: Tensor, *, meta: StateMeta, conv_SIW: Tensor) -> Tensor:
        """Convolve and activate: [T, I]. conv_SIW: the layer's states, advanced in place."""
        return causal_conv1d(
            x_TI, self.weight_IW, self.bias_I, conv_SIW=conv_SIW, meta=meta, activation=self.activation
        )


class Dynamics(WeightModule):
    """How the recurrent state decays and what passes it by, in float32. Shapes: those of the checkpoint."""

    A: Tensor
    """As it multiplies a time step: negative."""
    D: Tensor
    dt_bias: Tensor

    def __init__(self, name: str, *, decay_shape: tuple[int, ...], dt_bias: str) -> None:
        """decay_shape: [I, N] (Mamba-1) or [H] (Mamba-2). dt_bias: the bias' name in the checkpoint."""
        super().__init__()
        self.weights = (
            Weight("A", (Part(f"{name}.A_log", decay_shape),), is_float32=True),
            Weight("D", (Part(f"{name}.D", decay_shape[:1]),), is_float32=True),
            Weight("dt_bias", (Part(f"{name}.{dt_bias}", decay_shape[:1]),), is_float32=True),
        )

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; checkpoints hold the logarithm of -A."""
        setattr(self, weight.attribute, -torch.exp(tensor) if weight.attribute == "A" else tensor)


class MambaMixer(nn.Module):
    """Project, convolve, derive time steps, B and C from the result, scan, gate, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.mamba is not None, info
        self.info, self.mamba = info, info.mamba
        self.eps = config.norm_eps if self.mamba.inner_norm_eps is None else self.mamba.inner_norm_eps
        inner, rank, state = self.mamba.inner_size, self.mamba.dt_rank, self.mamba.state_size
        width, has_bias = config.hidden_size, self.mamba.has_bias
        self.in_proj = FusedLinear(width, {f"{name}.in_proj": 2 * inner}, has_bias=has_bias)
        self.conv = Conv(f"{name}.conv1d", self.mamba)
        self.x_proj = FusedLinear(inner, {f"{name}.x_proj": rank + 2 * state}, is_precious=True)
        self.dt_proj = FusedLinear(rank, {f"{name}.dt_proj": inner}, is_precious=True)
        self.dynamics = Dynamics(name, decay_shape=(inner, state), dt_bias="dt_proj.bias")
        self.out_proj = FusedLinear(inner, {f"{name}.out_proj": width}, has_bias=has_bias)
        sizes = {"dt": rank, "b": state, "c": state} if self.mamba.has_inner_norms else {}
        self.norms = tuple(
            Norm(f"{name}.{part}_layernorm", size) if self.mamba.has_inner_norm_weights else PlainNorm(size)
            for part, size in sizes.items()
        )
        self.norm_modules = nn.ModuleList(self.norms)  # so that torch knows them

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        x_TI, z_TI = self.in_proj(x_TE).chunk(2, dim=1)
        x_TI = self.conv(x_TI, meta=meta, conv_SIW=cache.conv_SIW)
        dt_TK, B_TN, C_TN = self._select(x_TI)
        out_TI = mamba1_scan(
            x_TI,
            self.dt_proj(dt_TK),
            A_IN=self.dynamics.A,
            B_TN=B_TN,
            C_TN=C_TN,
            D_I=self.dynamics.D,
            z_TI=z_TI,
            dt_bias_I=self.dynamics.dt_bias,
            state_SIN=cache.ssm_S,
            meta=meta,
        )
        return self.out_proj(out_TI)

    def _select(self, x_TI: Tensor) -> list[Tensor]:
        """What depends on the input: time steps (of dt_rank columns), B and C."""
        sizes = [self.mamba.dt_rank, self.mamba.state_size, self.mamba.state_size]
        parts = list(self.x_proj(x_TI).split(sizes, dim=1))
        if not self.norms:
            return parts
        return [rms_norm(part, norm.weight_E, eps=self.eps) for part, norm in zip(parts, self.norms, strict=True)]

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.conv.weight_IW.shape == (self.mamba.num_conv_channels, self.mamba.conv_width), info
        assert self.dynamics.A.shape == self.mamba.ssm_shape, (self.dynamics.A.shape, info)
