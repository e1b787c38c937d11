"""Gated activations: a program computes a stretch of one row."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import silu


@triton.jit
def act_mul_kernel(x_ptr, out_ptr, num_columns, stride_x, KIND: tl.constexpr, COLUMNS: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_inside = o_column < num_columns
    gate = tl.load(x_ptr + i_row * stride_x + o_column, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + i_row * stride_x + num_columns + o_column, mask=is_inside, other=0.0).to(tl.float32)
    if KIND == "silu":
        act = silu(gate)
    elif KIND == "gelu":
        act = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:  # (1 + tanh(u)) / 2 is sigmoid(2 u), here with u = sqrt(2 / pi) * (x + 0.044715 x^3)
        act = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    tl.store(out_ptr + i_row * num_columns + o_column, (act * up).to(out_ptr.dtype.element_ty), mask=is_inside)
