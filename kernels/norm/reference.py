"""RMSNorm in plain torch: computed in float32, cast once at the end."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    """x / rms(x) * weight, or * (1 + weight) when the weight is stored around zero."""
    x = x_TE.float()
    weight = weight_E.float() + 1 if zero_centered else weight_E.float()
    return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight).to(x_TE.dtype)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """The sum, rounded to the residual's dtype, and its norm: (normed, sum)."""
    sum_TE = residual_TE + x_TE
    return rms_norm(sum_TE, weight_E, eps=eps, zero_centered=zero_centered), sum_TE


def norm_add_norm(
    x_TE: Tensor, residual_TE: Tensor, *, post_weight_E: Tensor, pre_weight_E: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """Norm x, add it to the residual, norm the sum: (normed, sum)."""
    x_TE = rms_norm(x_TE, post_weight_E, eps=eps, zero_centered=zero_centered)
    return add_rms_norm(x_TE, residual_TE, pre_weight_E, eps=eps, zero_centered=zero_centered)
