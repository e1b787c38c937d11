"""A linear layer in plain torch, accumulated in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """x times the weight's transpose, plus the bias."""
    out_TN = x_TK.float() @ weight_NK.float().T
    if bias_N is not None:
        out_TN = out_TN + bias_N.float()
    return out_TN.to(out_dtype)


def fp8_linear(
    x_TK: Tensor, data_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """The same with a weight in fp8, or its bytes, and a factor for each output."""
    return linear(x_TK, data_NK.view(torch.float8_e4m3fn).float() * scales_N[:, None], bias_N, out_dtype=out_dtype)
