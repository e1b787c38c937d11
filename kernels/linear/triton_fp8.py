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
