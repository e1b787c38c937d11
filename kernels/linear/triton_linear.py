"""A linear layer whose rows don't depend on each other: one tile for all sizes, one loop over all inputs.

cuBLAS picks tiles, and splits of the inputs among programs, that suit the number of rows; so a row's last bits change
with its company.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows"])
def rows_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    stride_x,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """ROWS rows of x [T, K] by COLUMNS outputs of the weight [N, K], K in steps of STEP."""
    o_row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    o_column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    is_row, is_column = o_row < num_rows, o_column < OUTPUTS
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, INPUTS, STEP):
        o_input = first + tl.arange(0, STEP)
        is_input = o_input < INPUTS
        o_x, o_weight = o_row[:, None] * stride_x + o_input[None, :], o_column[:, None] * INPUTS + o_input[None, :]
        x = tl.load(x_ptr + o_x, mask=is_row[:, None] & is_input[None, :], other=0.0)
        weight = tl.load(weight_ptr + o_weight, mask=is_column[:, None] & is_input[None, :], other=0.0)
        total = tl.dot(x, tl.trans(weight), total, input_precision=PRECISION)
    if HAS_BIAS:
        total += tl.load(bias_ptr + o_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    o_out = o_row[:, None] * OUTPUTS + o_column[None, :]
    tl.store(out_ptr + o_out, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
