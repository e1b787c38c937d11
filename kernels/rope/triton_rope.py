"""Rotary embedding: a program turns a few heads of one token."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    num_heads,
    stride_token,
    stride_head,
    ROTARY: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    i_token = tl.program_id(0).to(tl.int64)
    o_head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    o_size = tl.arange(0, PADDED)
    is_turned = o_size < ROTARY
    is_inside = (o_head < num_heads)[:, None] & (o_size < SIZE)[None, :]
    # The element that this one turns with; the head's tail stands alone.
    o_other = tl.where(o_size < ROTARY // 2, o_size + ROTARY // 2, o_size - ROTARY // 2)
    o_other = tl.where(is_turned, o_other, o_size)
    x_row_ptr = x_ptr + i_token * stride_token + o_head[:, None] * stride_head
    x = tl.load(x_row_ptr + o_size[None, :], mask=is_inside, other=0.0).to(tl.float32)
    other = tl.load(x_row_ptr + o_other[None, :], mask=is_inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + i_token * ROTARY + o_size, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + i_token * ROTARY + o_size, mask=is_turned, other=0.0)
    sin = tl.where(o_size < ROTARY // 2, -sin, sin)
    out = x * cos[None, :] + other * sin[None, :]
    o_out = (i_token * num_heads + o_head[:, None]) * SIZE + o_size[None, :]
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_inside)
