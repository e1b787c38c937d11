"""Linear layers with weights in fp8 (e4m3), one factor an output: a tile of tokens by a tile of outputs a program."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_product import products


@triton.jit(do_not_specialize=["num_tokens"])
def fp8_linear_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    num_tokens,
    stride_x,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [T, N] = x [T, K] times w [N, K], in the inputs' dtype: weights are widened in registers."""
    o_token = tl.program_id(0) * TILE + tl.arange(0, TILE)
    o_column, o_depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    is_token, is_column = o_token < num_tokens, o_column < OUTPUTS
    x_ptrs = x_ptr + o_token.to(tl.int64)[:, None] * stride_x + o_depth[None, :]
    w_ptrs = w_ptr + o_column.to(tl.int64)[None, :] * INPUTS + o_depth[:, None]
    out, _ = products(x_ptrs, w_ptrs, is_token, is_column, 0, INPUTS, TILE, COLUMNS, DEPTH, PRECISION)
    out *= tl.load(scales_ptr + o_column, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + o_column, mask=is_column, other=0.0).to(tl.float32)[None, :]
    o_out = o_token.to(tl.int64)[:, None] * OUTPUTS + o_column[None, :]
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_column[None, :])


@triton.jit
def round_rows_kernel(x_ptr, out_ptr, scales_ptr, stride_x, INPUTS: tl.constexpr, DEPTH: tl.constexpr):
    """out [T, K] in fp8 and scales [T]: a token's largest element becomes the largest number that there is."""
    i_token = tl.program_id(0).to(tl.int64)
    o_depth = tl.arange(0, DEPTH)
    largest = tl.zeros([DEPTH], tl.float32)
    for first in range(0, INPUTS, DEPTH):
        x = tl.load(x_ptr + i_token * stride_x + first + o_depth, mask=first + o_depth < INPUTS, other=0.0)
        largest = tl.maximum(largest, tl.abs(x.to(tl.float32)))
    peak = tl.max(largest, 0)
    scale = tl.where(peak > 0.0, peak / 448.0, 1.0)
    tl.store(scales_ptr + i_token, scale)
    for first in range(0, INPUTS, DEPTH):
        is_input = first + o_depth < INPUTS
        x = tl.load(x_ptr + i_token * stride_x + first + o_depth, mask=is_input, other=0.0).to(tl.float32)
        tl.store(out_ptr + i_token * INPUTS + first + o_depth, (x / scale).to(tl.float8e4nv), mask=is_input)
