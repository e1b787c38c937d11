"""A linear layer in plain torch, accumulated in float32; and what rounding to integers does."""

from __future__ import annotations

import torch
from torch import Tensor

SMALLEST = 2.0**-100
"""What is nearer to zero than this is as good as zero: its inverse would be no float."""


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype, is_exact: bool = False
) -> Tensor:
    """x times the weight's transpose, plus the bias. is_exact: whether each row must be as if it were alone."""
    if is_exact and len(x_TK) > 1:
        return torch.cat([linear(x_1K, weight_NK, bias_N, out_dtype=out_dtype) for x_1K in x_TK.split(1)])
    out_TN = x_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        out_TN = out_TN + bias_N.float()
    return out_TN.to(out_dtype)


def round_rows(x_XK: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Round each row to integers from -most to most: (float32 [X, K], float32 [X], by which they are multiplied back).

    A row with NaN or infinity is NaN.
    """
    x_XK = x_XK.float()
    peak_X = x_XK.abs().amax(1) if x_XK.shape[1] else x_XK.new_zeros(len(x_XK))
    peak_X = torch.where(peak_X.isfinite(), peak_X.clamp(min=SMALLEST), torch.nan)
    return (x_XK * (most / peak_X)[:, None]).round(), peak_X / most


def linear_of_integers(
    x_TK: Tensor, weight_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None, *, most: int, out_dtype: torch.dtype
) -> Tensor:
    """x, rounded to integers row by row, times the transpose of an int8 weight, row n of which is times scales_N[n]."""
    rounded_TK, scales_T = round_rows(x_TK, most)
    return linear(rounded_TK * scales_T[:, None], weight_NK.float() * scales_N[:, None], bias_N, out_dtype=out_dtype)
