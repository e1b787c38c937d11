"""RMSNorm, alone and fused with the additions around it."""

from __future__ import annotations

from torch import Tensor

from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_same, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = ["add_rms_norm", "norm_add_norm", "rms_norm"]


def rms_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool = False) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, computed in float32, cast to x's dtype at the end.

    x_TE: float32 or bfloat16, any number of leading dimensions. weight_E: x's dtype or float32.
    zero_centered: multiply by 1 + weight (Gemma). Raises ShapeError when shapes or dtypes don't fit.
    """
    check_dtype("x_TE", x_TE, *FLOATS)
    check_shape("weight_E", weight_E, x_TE.shape[-1])
    run = implementation(__name__, x_TE.device.type).rms_norm
    return run(x_TE, weight_E, eps=eps, zero_centered=zero_centered)


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool = False
) -> tuple[Tensor, Tensor]:
    """Add x to the residual and norm the sum: (normed, sum), both in x's dtype; the inputs stay as they are.

    Raises ShapeError when shapes or dtypes don't fit.
    """
    _check_pair(x_TE, residual_TE, weight_E)
    run = implementation(__name__, x_TE.device.type).add_rms_norm
    return run(x_TE, residual_TE, weight_E, eps=eps, zero_centered=zero_centered)


def norm_add_norm(
    x_TE: Tensor,
    residual_TE: Tensor,
    *,
    post_weight_E: Tensor,
    pre_weight_E: Tensor,
    eps: float,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """Norm a sublayer's output, add it to the residual, norm the sum for the next sublayer: (normed, sum).

    Gemma 2 and 3 close every sublayer with this. Raises ShapeError when shapes or dtypes don't fit.
    """
    _check_pair(x_TE, residual_TE, post_weight_E)
    check_shape("pre_weight_E", pre_weight_E, x_TE.shape[-1])
    run = implementation(__name__, x_TE.device.type).norm_add_norm
    return run(
        x_TE,
        residual_TE,
        post_weight_E=post_weight_E,
        pre_weight_E=pre_weight_E,
        eps=eps,
        zero_centered=zero_centered,
    )


def _check_pair(x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor) -> None:
    check_dtype("x_TE", x_TE, *FLOATS)
    check_same("residual_TE", residual_TE, "x_TE", x_TE)
    check_shape("residual_TE", residual_TE, *x_TE.shape)
    check_shape("weight_E", weight_E, x_TE.shape[-1])
