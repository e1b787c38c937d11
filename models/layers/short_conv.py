"""The short convolution of Lfm: gated before and after, and nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.mamba import Conv

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerInfo, StateCache
    from hybrid_engine.models.config import DecoderConfig


class ShortConv(nn.Module):
    """Project to two gates and an input, gate the input, convolve, gate the result, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.short_conv is not None, info
        self.info, self.short_conv = info, info.short_conv
        channels, width, has_bias = self.short_conv.num_conv_channels, config.hidden_size, self.short_conv.has_bias
        self.in_proj = FusedLinear(width, {f"{name}.in_proj": 3 * channels}, has_bias=has_bias)
        self.conv = Conv(f"{name}.conv", self.short_conv, activation=None)
        self.out_proj = FusedLinear(channels, {f"{name}.out_proj": width}, has_bias=has_bias)

    def forward(self, x_TE: Tensor, *, meta: StateMeta, cache: StateCache) -> Tensor:
        """[T, E]. cache: the layer's states, advanced in place; of them only the convolution's inputs are used."""
        before_TI, after_TI, x_TI = self.in_proj(x_TE).chunk(3, dim=1)
        convolved_TI = self.conv(before_TI * x_TI, meta=meta, conv_SIW=cache.conv_SIW)
        return self.out_proj(after_TI * convolved_TI)

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        shape = (self.short_conv.num_conv_channels, self.short_conv.conv_width)
        assert self.conv.weight_IW.shape == shape, (self.conv.weight_IW.shape, info)
