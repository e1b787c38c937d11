"""Weights in fp8 (e4m3) on a GPU: of each output's weights the largest one stands for the largest number there is.

Four significant bits are left of each weight, and half the bytes of bfloat16 are read. Inputs of few tokens stay as
they are, since reading weights is the work there.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.dispatch import implementation

LARGEST = 448.0
"""Of e4m3. Source: Micikevicius et al., FP8 Formats for Deep Learning (arXiv 2209.05433), table 1."""
ROWS_AT_ONCE = 4096
"""Rows of a weight that are float32 at the same time."""


class Fp8Form:
    """A weight [N, K] in fp8."""

    def __init__(self, weight_NK: Tensor) -> None:
        self.dtype = weight_NK.dtype
        self._run = implementation("hybrid_engine.kernels.linear", weight_NK.device.type)
        rounded_NK, self.scales_N = round_to_fp8(weight_NK)
        self.data = self._run.pack_fp8(rounded_NK)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(each.numel() * each.element_size() for each in (self.data, self.scales_N))

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.fp8_linear."""
        return self._run.fp8_linear(x_TK, self.data, self.scales_N, bias_N, out_dtype=out_dtype)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, in the dtype that it had."""
        rows_TK = self.data.view(torch.uint8)[ids_T].view(torch.float8_e4m3fn)
        return (rows_TK.float() * self.scales_N[ids_T, None]).to(self.dtype)


def round_to_fp8(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Round [..., N, K]: to fp8, and what each output is multiplied with, float32 [..., N]. Zeros stay zeros."""
    rows_XK = weights.flatten(0, -2)
    rounded_XK = torch.empty(rows_XK.shape, dtype=torch.float8_e4m3fn, device=weights.device)
    scales_X = torch.empty(len(rows_XK), dtype=torch.float32, device=weights.device)
    for start in range(0, len(rows_XK), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        wide_XK = rows_XK[rows].float()
        peaks_X = wide_XK.abs().amax(1)
        scales_X[rows] = torch.where(peaks_X > 0, peaks_X / LARGEST, 1.0)
        # Rounding of the quotient may carry it beyond the largest number, which a cast makes NaN of.
        rounded_XK[rows] = (wide_XK / scales_X[rows, None]).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return rounded_XK.view(weights.shape), scales_X.view(weights.shape[:-1])
