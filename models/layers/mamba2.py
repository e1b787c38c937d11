"""The Mamba-2 mixer: one projection for everything, a causal convolution, a scan by heads, a gated norm."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act
from hybrid_engine.kernels.ssm import StateMeta, gated_rms_norm, mamba2_scan
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mamba import Conv, Dynamics
from hybrid_engine.models.layers.norm import Norm

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig


class Mamba2Mixer(nn.Module):
    """Project, convolve what enters the scan and B and C with it, scan, norm with the gate, project back."""

    column_scales_C: Tensor | None

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.mamba is not None, info
        self.info, self.mamba = info, info.mamba
        self.eps = config.norm_eps if self.mamba.gated_norm_eps is None else self.mamba.gated_norm_eps
        inner, has_bias, has_output_bias = self.mamba.inner_size, self.mamba.has_bias, self.mamba.has_output_bias
        # Columns: gate, then what is convolved (scan's input, B, C), then time steps.
        self.column_sizes = (inner, self.mamba.num_conv_channels, self.mamba.num_heads)
        projected = {f"{name}.in_proj": sum(self.column_sizes)}
        self.in_proj = FusedLinear(config.hidden_size, projected, has_bias=has_bias)
        self.register_buffer("column_scales_C", self._column_scales(), persistent=False)
        self.conv = Conv(f"{name}.conv1d", self.mamba)
        self.dynamics = Dynamics(name, decay_shape=(self.mamba.num_heads,), dt_bias="dt_bias")
        self.norm = Norm(f"{name}.norm", inner) if self.mamba.has_gated_norm else None
        out_bias = has_bias if has_output_bias is None else has_output_bias
        self.out_proj = FusedLinear(inner, {f"{name}.out_proj": config.hidden_size}, has_bias=out_bias)

    def _column_scales(self) -> Tensor | None:
        mamba = self.mamba
        if not mamba.column_scales:
            return None
        group_columns = mamba.num_groups * mamba.state_size
        sizes = torch.tensor([mamba.inner_size, mamba.inner_size, group_columns, group_columns, mamba.num_heads])
        return torch.tensor(mamba.column_scales).repeat_interleave(sizes)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        mamba = self.mamba
        projected_TC = self.in_proj(x_TE)
        if self.column_scales_C is not None:
            projected_TC = (projected_TC * self.column_scales_C).to(x_TE.dtype)
        gate_TI, xBC_TC, dt_TH = projected_TC.split(self.column_sizes, dim=1)
        xBC_TC = self.conv(xBC_TC, meta=meta, conv_SIW=cache.conv_SIW)
        group_columns = mamba.num_groups * mamba.state_size
        x_TI, B_TM, C_TM = xBC_TC.split([mamba.inner_size, group_columns, group_columns], dim=1)
        out_THD = mamba2_scan(
            x_TI.unflatten(1, (mamba.num_heads, mamba.head_size)),
            dt_TH,
            A_H=self.dynamics.A,
            B_TGN=B_TM.unflatten(1, (mamba.num_groups, mamba.state_size)),
            C_TGN=C_TM.unflatten(1, (mamba.num_groups, mamba.state_size)),
            D_H=self.dynamics.D,
            dt_bias_H=self.dynamics.dt_bias,
            dt_limit=mamba.dt_limit,
            state_SHDN=cache.ssm_S,
            meta=meta,
        )
        return self.out_proj(self._gate(out_THD.flatten(1), gate_TI))

    def _gate(self, out_TI: Tensor, gate_TI: Tensor) -> Tensor:
        if self.norm is None:
            return (out_TI.float() * act(gate_TI.float(), kind="silu")).to(out_TI.dtype)
        return gated_rms_norm(
            out_TI,
            gate_TI,
            self.norm.weight_E,
            eps=self.eps,
            group_size=self.mamba.inner_size // self.mamba.num_groups,
            norm_before_gate=self.mamba.is_normed_before_gate,
        )

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.conv.weight_IW.shape == (self.mamba.num_conv_channels, self.mamba.conv_width), info
        assert self.dynamics.A.shape == (self.mamba.num_heads,), (self.dynamics.A.shape, info)
