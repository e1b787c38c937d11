"""Weights in 8 bits on a CPU: of each output's weights the largest one stands for 127.

Inputs are rounded as well, each token by its own largest element: the sums are of integers, exact in any order, so a
token's result is the same bits in any company. In 16 bits (quantization 'int8') that loses no more
than bfloat16 does; in 8 bits (quantization 'w8a8') it takes half the work.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.linear import cpu, reference
from hybrid_engine.kernels.native import num_threads

BYTES, WORDS = 2**7 - 1, 2**15 - 1
"""What inputs are rounded to, at most: 8 or 16 bits with a sign."""
MOST_INPUTS = 2**16
"""Of a row: as many products of 255 and 127 fit 32 bits."""
ROWS_AT_ONCE = 4096
"""Rows of a weight that are float32 at the same time."""


class Int8Form:
    """A weight in 8 bits, in plain torch."""

    def __init__(self, weight_NK: Tensor, most: int) -> None:
        """most: BYTES or WORDS, what inputs are rounded to."""
        self.dtype = weight_NK.dtype
        self.most = most
        self.data, self.scales_N = round_weight(weight_NK)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(each.numel() * each.element_size() for each in vars(self).values() if isinstance(each, Tensor))

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
        return (self.integers(ids_T) * self.scales_N[ids_T, None]).to(self.dtype)

    def integers(self, ids_T: Tensor) -> Tensor:
        """Rows of integers, int8."""
        return self.data[ids_T]


class TiledInt8Form(Int8Form):
    """The same in tiles, multiplied by our own product."""

    def __init__(self, weight_NK: Tensor, most: int) -> None:
        """most: BYTES or WORDS, what inputs are rounded to. Raises ShapeError for a weight too wide for that."""
        super().__init__(weight_NK, most)
        self.shape = num_outputs, num_inputs = (weight_NK.shape[0], weight_NK.shape[1])
        if num_inputs > MOST_INPUTS:
            raise ShapeError(f"weight_NK has {num_inputs:,} inputs, at most {MOST_INPUTS:,} can be summed up in 8 bits")
        integers_NK = self.data
        self.data = cpu.pack_tiles(integers_NK, group=4)
        padding = (0, -num_outputs % 16)
        self.scales_N = F.pad(self.scales_N, padding)
        self.corrections_N = F.pad(128 * integers_NK.sum(1, dtype=torch.int32), padding)
        """What a byte's 128 above its integer adds to a sum."""

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear_of_integers."""
        if x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        if bias_N is not None:
            bias_N = bias_N.float().contiguous()
        out_TN = torch.empty(len(x_TK), self.shape[0], dtype=out_dtype)
        cpu.library.load().linear_int8(
            x_TK.data_ptr(),
            x_TK.stride(0),
            x_TK.dtype == torch.bfloat16,
            1 if self.most == BYTES else 2,
            self.data.data_ptr(),
            self.scales_N.data_ptr(),
            self.corrections_N.data_ptr(),
            None if bias_N is None else bias_N.data_ptr(),
            out_TN.data_ptr(),
            out_dtype == torch.bfloat16,
            len(x_TK),
            *self.shape,
            num_threads(),
        )
        return out_TN

    def integers(self, ids_T: Tensor) -> Tensor:
        """Rows of integers, int8."""
        return cpu.unpack_rows(self.data, ids_T, shape=self.shape)


def pack_int8(weight_NK: Tensor, most: int) -> Int8Form:
    """The weight in 8 bits, in tiles where they can be multiplied."""
    is_tiled = 0 not in weight_NK.shape and cpu.library.load() is not None
    return (TiledInt8Form if is_tiled else Int8Form)(weight_NK, most)


def round_weight(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Round each output's weights: int8 [N, K], and what they are multiplied with, float32 [N]."""
    rounded_NK = torch.empty(weight_NK.shape, dtype=torch.int8)
    scales_N = torch.empty(len(weight_NK))
    for start in range(0, len(weight_NK), ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        rounded_NK[rows], scales_N[rows] = reference.round_rows(weight_NK[rows], BYTES)
    return rounded_NK, scales_N
