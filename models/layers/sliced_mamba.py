"""Mamba-1 in slices of its channels, each with time steps, B and C of its own (Zamba)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.ssm import StateMeta, mamba1_scan
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mamba import Conv
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig


class SliceWeights(WeightModule):
    """What the slices have of their own, stacked in the checkpoint: projections, decays, what passes the state by."""

    x_projs: list[PackedLinear]
    dt_projs: list[PackedLinear]
    A: Tensor
    """As it multiplies a time step: negative. Like the others [slices, channels of one, ...], in float32."""
    D: Tensor
    dt_bias: Tensor

    def __init__(self, name: str, *, num_slices: int, channels: int, rank: int, state_size: int) -> None:
        """channels: of one slice."""
        super().__init__()
        self.num_slices = num_slices
        shapes = {
            "x_projs": ("x_proj_weight", (rank + 2 * state_size, channels)),
            "dt_projs": ("dt_proj_weight", (channels, rank)),
            "A": ("A_log", (channels, state_size)),
            "D": ("D", (channels,)),
            "dt_bias": ("dt_proj_bias", (channels,)),
        }
        self.weights = tuple(
            Weight(kept, (Part(f"{name}.{stored}", (num_slices, *shape)),), is_float32=not kept.endswith("projs"))
            for kept, (stored, shape) in shapes.items()
        )

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Pack projections slice by slice, keep the rest; checkpoints hold the logarithm of -A."""
        if weight.attribute.endswith("projs"):
            setattr(
                self, weight.attribute, [PackedLinear.pack(matrix_NK, is_exact=self.is_exact) for matrix_NK in tensor]
            )
        else:
            setattr(self, weight.attribute, -torch.exp(tensor) if weight.attribute == "A" else tensor)


def pairs_to_halves(weight_C: Tensor) -> Tensor:
    """Bring rows from pairs (input, gate, input, gate, ...) to all inputs, then all gates."""
    return weight_C.unflatten(0, (-1, 2)).transpose(0, 1).flatten(0, 1)


class SlicedMambaMixer(nn.Module):
    """Project, convolve; in each slice derive time steps, B and C, scan and gate; project all back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.mamba is not None, info
        assert info.mamba.num_slices is not None, info
        self.info, self.mamba = info, info.mamba
        inner, width, has_bias = self.mamba.inner_size, config.hidden_size, self.mamba.has_bias
        in_name = f"{name}.in_proj"
        self.in_proj = FusedLinear(width, {in_name: 2 * inner}, has_bias=has_bias, changes={in_name: pairs_to_halves})
        self.conv = Conv(f"{name}.conv1d", self.mamba)
        self.slices = SliceWeights(
            name,
            num_slices=info.mamba.num_slices,
            channels=inner // info.mamba.num_slices,
            rank=self.mamba.dt_rank,
            state_size=self.mamba.state_size,
        )
        self.out_proj = FusedLinear(inner, {f"{name}.out_proj": width}, has_bias=has_bias)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        x_TI, z_TI = self.in_proj(x_TE).chunk(2, dim=1)
        x_TI = self.conv(x_TI, meta=meta, conv_SIW=cache.conv_SIW)
        num_slices = self.slices.num_slices
        parts = zip(
            x_TI.chunk(num_slices, dim=1),
            z_TI.chunk(num_slices, dim=1),
            cache.ssm_S.chunk(num_slices, dim=1),
            strict=True,
        )
        outs = [self._scan(index, *part, meta=meta) for index, part in enumerate(parts)]
        return self.out_proj(torch.cat(outs, 1))

    def _scan(self, index: int, x_TI: Tensor, z_TI: Tensor, state_SIN: Tensor, *, meta: StateMeta) -> Tensor:
        """One slice: [T, I], where I is its channels. state_SIN: advanced in place."""
        sizes = [self.mamba.dt_rank, self.mamba.state_size, self.mamba.state_size]
        dt_TK, B_TN, C_TN = linear(x_TI.contiguous(), self.slices.x_projs[index]).split(sizes, dim=1)
        return mamba1_scan(
            x_TI,
            linear(dt_TK.contiguous(), self.slices.dt_projs[index]),
            A_IN=self.slices.A[index],
            B_TN=B_TN,
            C_TN=C_TN,
            D_I=self.slices.D[index],
            z_TI=z_TI,
            dt_bias_I=self.slices.dt_bias[index],
            state_SIN=state_SIN,
            meta=meta,
        )

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.conv.weight_IW.shape == (self.mamba.num_conv_channels, self.mamba.conv_width), info
        assert self.slices.A.flatten(0, 1).shape == self.mamba.ssm_shape, (self.slices.A.shape, info)
