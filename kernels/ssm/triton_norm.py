"""The gated norm behind a scan: a program norms one group of columns of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import silu


@triton.jit
def gated_norm_kernel(
    x_ptr,
    gate_ptr,
    weight_ptr,
    out_ptr,
    stride_x,
    stride_gate,
    eps,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    NORM_FIRST: tl.constexpr,
    IS_SILU: tl.constexpr,
):
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.arange(0, PADDED)
    is_column = o_column < SIZE
    o_column += tl.program_id(1) * SIZE
    x = tl.load(x_ptr + i_row * stride_x + o_column, mask=is_column, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + i_row * stride_gate + o_column, mask=is_column, other=0.0).to(tl.float32)
    gate = silu(gate) if IS_SILU else tl.sigmoid(gate)
    weight = tl.load(weight_ptr + o_column, mask=is_column, other=0.0).to(tl.float32)
    if not NORM_FIRST:
        x *= gate
    out = x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps) * weight
    if NORM_FIRST:
        out *= gate
    o_out = i_row * (tl.num_programs(1) * SIZE) + o_column
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_column)
