"""The recurrent block of RecurrentGemma: a convolution and a real-gated linear recurrent unit, gated.

Source: the Griffin paper (https://arxiv.org/abs/2402.19427), section 2.4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_engine.kernels.activation import act
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.ssm import StateMeta, mamba1_scan
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mamba import Conv
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerInfo, RgLruInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig

GATE_SCALE = 8.0
"""The paper's c: how fast a state decays at most."""
LEAST_STEP = 1e-30
"""Steps are divided by; below this a decay is 1 in any case."""


class Gates(WeightModule):
    """Both gates of each block of channels, and how fast each channel decays."""

    projs: list[PackedLinear]
    biases: Tensor
    """float32 [blocks, 2 * channels of one]: the input gate's, then the recurrence gate's."""
    speed_I: Tensor
    """float32, above 0: the step of a wide open gate."""

    def __init__(self, name: str, info: RgLruInfo) -> None:
        super().__init__()
        blocks, size = info.num_blocks, info.num_conv_channels // info.num_blocks
        gates = [f"{name}.{gate}_gate" for gate in ("input", "recurrent")]
        self.weights = (
            Weight("projs", tuple(Part.transposed(f"{gate}_weight", (blocks, size, size)) for gate in gates)),
            Weight("biases", tuple(Part(f"{gate}_bias", (blocks, size)) for gate in gates), is_float32=True),
            Weight("speed_I", (Part(f"{name}.recurrent_param", (info.num_conv_channels,)),), is_float32=True),
        )

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; of gates, those of one block side by side."""
        if weight.attribute == "speed_I":
            self.speed_I = GATE_SCALE * F.softplus(tensor)
            return
        of_blocks = torch.cat(tensor.chunk(2), 1)
        if weight.attribute == "biases":
            self.biases = of_blocks
        else:
            self.projs = [PackedLinear.pack(matrix_NK.contiguous(), is_exact=self.is_exact) for matrix_NK in of_blocks]

    def forward(self, x_TI: Tensor) -> tuple[Tensor, Tensor]:
        """(the input's gate, the step of the recurrence), both float32 [T, I]."""
        blocks = zip(x_TI.chunk(len(self.projs), 1), self.projs, self.biases, strict=True)
        gates = [linear(x.contiguous(), proj).float() + bias for x, proj, bias in blocks]
        opened = [act(gate, kind="sigmoid").chunk(2, 1) for gate in gates]
        inputs, steps = (torch.cat(parts, 1) for parts in zip(*opened, strict=True))
        return inputs, (steps * self.speed_I).clamp(min=LEAST_STEP)


class RgLruMixer(nn.Module):
    """Project to a gate and an input, convolve the input, run the recurrence, gate, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.rg_lru is not None, info
        assert config.activation == "gelu_tanh", config.activation
        self.info, self.rg_lru = info, info.rg_lru
        channels, width = self.rg_lru.num_conv_channels, config.hidden_size
        inner = {f"{name}.linear_y": channels, f"{name}.linear_x": channels}
        self.in_proj = FusedLinear(width, inner, has_bias=True)
        self.conv = Conv(f"{name}.conv_1d", self.rg_lru, activation=None)
        self.gates = Gates(f"{name}.rg_lru", self.rg_lru)
        self.out_proj = FusedLinear(channels, {f"{name}.linear_out": width}, has_bias=True)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place."""
        y_TI, x_TI = self.in_proj(x_TE).chunk(2, dim=1)
        x_TI = self.conv(x_TI, meta=meta, conv_SIW=cache.conv_SIW)
        input_TI, step_TI = self.gates(x_TI)
        # state = exp(-step) * state + scale * input: what enters is scaled so that its size stays, but for token 0.
        scale_TI = torch.where(first_tokens(meta)[:, None], 1.0, (-torch.expm1(-2 * step_TI)).sqrt())
        out_TI = self._recur((x_TI * input_TI).to(x_TI.dtype) * scale_TI.to(x_TI.dtype), step_TI, meta, cache)
        return self.out_proj(out_TI.to(x_TE.dtype) * act(y_TI, kind="gelu_tanh"))

    def _recur(self, x_TI: Tensor, step_TI: Tensor, meta: StateMeta, cache: StateCache) -> Tensor:
        """Mamba-1's scan with one state a channel, A = -1, B = C = 1 and D = 0: float32 [T, I].

        It adds step * input to a state, and takes steps before their softplus.
        """
        one_T1, minus_one_I1 = step_TI.new_ones(len(step_TI), 1), -step_TI.new_ones(step_TI.shape[1], 1)
        return mamba1_scan(
            x_TI.float() / step_TI,
            step_TI + torch.log(-torch.expm1(-step_TI)),
            A_IN=minus_one_I1,
            B_TN=one_T1,
            C_TN=one_T1,
            D_I=step_TI.new_zeros(step_TI.shape[1]),
            state_SIN=cache.ssm_S,
            meta=meta,
        )

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        assert self.conv.weight_IW.shape == (self.rg_lru.num_conv_channels, self.rg_lru.conv_width), info
        assert self.gates.speed_I.shape == self.rg_lru.ssm_shape[:1], (self.gates.speed_I.shape, info)


def first_tokens(meta: StateMeta) -> Tensor:
    """Which tokens are the first of their texts: bool [T]."""
    starts_R, stops_R = meta.query_starts[:-1].long(), meta.query_starts[1:].long()
    is_first_R = ~meta.has_history_R & (stops_R > starts_R)
    # One place more, where requests without tokens at the end of the batch would write.
    found = starts_R.new_zeros(meta.host.num_tokens + 1).index_put((starts_R,), is_first_R.long(), accumulate=True)
    return found[:-1] > 0
