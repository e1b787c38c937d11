"""RMSNorm on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.norm.triton_norm import norm_kernel

_PROGRAM_ELEMENTS = 1024
"""Rows shorter than this share a program."""


def rms_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    """As reference.rms_norm."""
    out_TE, _ = _run(x_TE, None, None, weight_E, eps=eps, zero_centered=zero_centered)
    return out_TE


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """As reference.add_rms_norm."""
    return _run(x_TE, residual_TE, None, weight_E, eps=eps, zero_centered=zero_centered)


def norm_add_norm(
    x_TE: Tensor, residual_TE: Tensor, *, post_weight_E: Tensor, pre_weight_E: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """As reference.norm_add_norm."""
    return _run(x_TE, residual_TE, post_weight_E, pre_weight_E, eps=eps, zero_centered=zero_centered)


def _run(
    x_TE: Tensor,
    residual_TE: Tensor | None,
    post_E: Tensor | None,
    weight_E: Tensor,
    *,
    eps: float,
    zero_centered: bool,
) -> tuple[Tensor, Tensor]:
    """(normed, sum); without a residual there is no sum, and the normed stands in for it."""
    rows = _as_rows(x_TE)
    residual = rows if residual_TE is None else _as_rows(residual_TE)
    out_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
    sum_TE = out_TE if residual_TE is None else torch.empty_like(out_TE)
    num_rows, num_columns = rows.shape
    if num_rows == 0:
        return out_TE, sum_TE
    columns = next_power_of_2(num_columns)
    rows_in_program = max(1, _PROGRAM_ELEMENTS // columns)
    weight_E = weight_E.contiguous()
    norm_kernel[(-(-num_rows // rows_in_program),)](
        rows,
        residual,
        weight_E if post_E is None else post_E.contiguous(),
        weight_E,
        out_TE,
        sum_TE,
        num_rows,
        num_columns,
        rows.stride(0),
        residual.stride(0),
        eps,
        HAS_POST=post_E is not None,
        HAS_RESIDUAL=residual_TE is not None,
        IS_CENTERED=zero_centered,
        ROWS=rows_in_program,
        COLUMNS=columns,
        num_warps=min(16, max(4, columns // 512)),
    )
    return out_TE, sum_TE


def _as_rows(x: Tensor) -> Tensor:
    """The tensor as rows of its last dimension, copied only where its strides don't allow a view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()
