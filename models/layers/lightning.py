"""Lightning attention (MiniMax): linear attention whose state decays by a factor that is fixed for each head.

Source: Lightning Attention-2, https://arxiv.org/abs/2401.04658. It is Mamba-2's scan with time steps of one: keys stand
for B, queries for C, values for x, nothing passes the state by.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act
from hybrid_engine.kernels.ssm import StateMeta, gated_rms_norm, mamba2_scan
from hybrid_engine.models.layers.delta_net import ungroup
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig

NORM_EPS = 1e-6
"""Of the norm behind the attention, whatever the others have."""


def decays(info: LayerInfo, num_layers: int) -> Tensor:
    """What a head's state is multiplied with by one token, as logarithms: [H]. Later layers forget more slowly."""
    assert info.lightning is not None, info
    num_heads = info.lightning.num_heads
    slopes_H = 2.0 ** (-8.0 / num_heads * torch.arange(1, num_heads + 1, dtype=torch.float64))
    return (-slopes_H * (1 - info.index / (num_layers - 1 + 1e-5) + 1e-5)).float()


class LightningAttention(nn.Module):
    """Project, activate, scan, norm and gate, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.lightning is not None, info
        assert config.activation == "silu", config.activation
        self.info, self.lightning = info, info.lightning
        num_heads, size = self.lightning.num_heads, self.lightning.head_size
        self.columns = num_heads * size
        names = {f"{name}.output_gate": self.columns, f"{name}.qkv_proj": 3 * self.columns}
        changes = {f"{name}.qkv_proj": partial(ungroup, sizes=(size,) * 3, order=(0, 1, 2))}
        self.in_proj = FusedLinear(config.hidden_size, names, changes=changes)
        self.norm = Norm(f"{name}.norm", self.columns)
        self.out_proj = FusedLinear(self.columns, {f"{name}.out_proj": config.hidden_size})
        self.A_H = nn.Buffer(decays(info, len(config.layers)), persistent=False)
        self.no_skip_H = nn.Buffer(torch.zeros(num_heads), persistent=False)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place; it has no convolution."""
        gate_TI, qkv_TC = self.in_proj(x_TE).tensor_split([self.columns], 1)
        q_THN, k_THN, v_THD = act(qkv_TC, kind="silu").unflatten(1, (3, self.lightning.num_heads, -1)).unbind(1)
        out_THD = mamba2_scan(
            v_THD,
            v_THD.new_zeros(v_THD.shape[:2]),
            A_H=self.A_H,
            B_TGN=k_THN,
            C_TGN=q_THN,
            D_H=self.no_skip_H,
            dt_limit=(1.0, 1.0),
            state_SHDN=cache.ssm_S,
            meta=meta,
        )
        normed_TI = gated_rms_norm(
            out_THD.flatten(1),
            gate_TI,
            self.norm.weight_E,
            eps=NORM_EPS,
            norm_before_gate=True,
            activation="sigmoid",
        )
        return self.out_proj(normed_TI)

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.norm.weight_E.shape == (self.columns,), (self.norm.weight_E.shape, info)
