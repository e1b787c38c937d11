"""RMSNorm, with the additions around it, in one pass: a program holds a few whole rows."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _normed(x, weight_ptr, o_column, is_column, num_columns, eps, IS_CENTERED: tl.constexpr):
    weight = tl.load(weight_ptr + o_column, mask=is_column, other=0.0).to(tl.float32)
    if IS_CENTERED:
        weight += 1.0
    mean = tl.sum(x * x, 1) / num_columns
    return x * tl.rsqrt(mean + eps)[:, None] * weight[None, :]


@triton.jit(do_not_specialize=["num_rows"])
def norm_kernel(
    x_ptr,
    residual_ptr,
    post_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    num_rows,
    num_columns,
    stride_x,
    stride_residual,
    eps,
    HAS_POST: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out = norm(sum), sum = residual + x, x normed by `post` before; rounded to their dtype where they are stored."""
    o_row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.arange(0, COLUMNS)
    is_column = o_column < num_columns
    is_inside = (o_row < num_rows)[:, None] & is_column[None, :]
    x = tl.load(x_ptr + o_row[:, None] * stride_x + o_column[None, :], mask=is_inside, other=0.0).to(tl.float32)
    if HAS_POST:
        x = _normed(x, post_ptr, o_column, is_column, num_columns, eps, IS_CENTERED)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    o_out = o_row[:, None] * num_columns + o_column[None, :]
    if HAS_RESIDUAL:
        o_residual = o_row[:, None] * stride_residual + o_column[None, :]
        x += tl.load(residual_ptr + o_residual, mask=is_inside, other=0.0).to(tl.float32)
        b_sum = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + o_out, b_sum, mask=is_inside)
        x = b_sum.to(tl.float32)
    out = _normed(x, weight_ptr, o_column, is_column, num_columns, eps, IS_CENTERED)
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_inside)
