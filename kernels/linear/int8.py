"""Weights in 8 bits on a CPU: of each output's weights the largest one stands for 127.

Inputs are rounded as well, each token by its own largest element: the sums are of integers, exact in any order, so a
token's result is the same bits in any company and on any processor. In 16 bits (quantization 'int8') that loses no more
than bfloat16 does; in 8 bits (quantization 'w8a8') it takes half the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.linear import reference

BYTES, WORDS = 2**7 - 1, 2**15 - 1
"""What inputs are rounded to, at most: 8 or 16 bits with a sign."""
ROWS_AT_ONCE = 4096
"""Rows of a weight that are float32 at the same time."""


class Int8Form:
    """A weight in 8 bits."""

    def __init__(self, weight_NK: Tensor, most: int) -> None:
        """most: BYTES or WORDS, what inputs are rounded to."""
        self.dtype = weight_NK.dtype
        self.most = most
        self.data, self.scales_N = round_weight(weight_NK)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(each.numel() * each.element_size() for each in (self.data, self.scales_N))

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear_of_integers."""
        rounded_TK, scales_T = reference.round_rows(x_TK, self.most)
        outs = [
            (rounded_TK @ part_NK.float().T) * scales_T[:, None] * scales_N
            for part_NK, scales_N in zip(self.data.split(ROWS_AT_ONCE), self.scales_N.split(ROWS_AT_ONCE), strict=True)
        ]
        out_TN = torch.cat(outs, 1)
        return (out_TN if bias_N is None else out_TN.add_(bias_N)).to(out_dtype)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, in the dtype that it had."""
        return (self.data[ids_T] * self.scales_N[ids_T, None]).to(self.dtype)


def round_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights: int8 [N, K], and what they are multiplied with, float32 [N]."""
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scales_N = torch.empty(len(weight_NK))
    for start in range(0, len(weight_NK), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        rounded_NK[rows], scales_N[rows] = reference.round_rows(weight_NK[rows], BYTES)
    return rounded_NK, scales_N
