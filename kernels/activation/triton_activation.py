"""Gated activations: a program computes a stretch of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import gated


@triton.jit
def act_mul_kernel(x_ptr, out_ptr, num_columns, stride_x, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = o_column < num_columns
    gate = tl.load(x_ptr + i_row * stride_x + o_column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + i_row * stride_x + num_columns + o_column, mask=is_inside, other=0.0).to(tl.float32)
    out = gated(gate, up, 0.0, 0.0, KIND)
    tl.store(out_ptr + i_row * num_columns + o_column, out.to(out_ptr.dtype.element_ty), mask=is_inside)
