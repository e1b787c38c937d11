"""Functions that several Triton kernels share.

Only what Triton's interpreter knows too: nothing of libdevice. Numbers that change from step to step are kept from
being specialised (do_not_specialize), since a kernel would be compiled anew for 1 and for multiples of 16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def dot_precision(dtype: torch.dtype) -> str:
    """How tl.dot multiplies float32 where the inputs of an op have this dtype.

    float32 inputs: three products of tf32 halves, as exact as float32 to a unit or two. bfloat16 inputs: tf32, which
    holds them exactly and rounds only what was computed from them, to 11 bits.
    """
    return "tf32x3" if dtype == torch.float32 else "tf32"


@triton.jit
def silu(x):
    return x * tl.sigmoid(x)


@triton.jit
def tanh(x):
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def gelu_tanh(x):
    # (1 + tanh(u)) / 2 is sigmoid(2 u), here with u = sqrt(2 / pi) * (x + 0.044715 x^3)
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def gated(gate, up, alpha, limit, KIND: tl.constexpr):
    """act(gate) * up, by the names of kernels.moe.Activation; alpha and limit are of some kinds only."""
    if KIND == "silu":
        out = silu(gate) * up
    elif KIND == "gelu_tanh":
        out = gelu_tanh(gate) * up
    elif KIND == "gelu":
        out = 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif KIND == "swiglu_clamped":
        below = clamped(gate, float("-inf"), limit)
        out = below * tl.sigmoid(alpha * below) * (clamped(up, -limit, limit) + 1.0)
    else:  # relu_squared: there is no gate beside it
        tl.static_assert(KIND == "relu_squared")
        above = clamped(gate, 0.0, float("inf"))
        out = above * above
    return out


@triton.jit
def clamped(x, low, high):
    # A NaN stays one: minimum and maximum would lose it.
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def softplus(x):
    # log(1 + u) for u in (0, 1], with the rounding of 1 + u made good again.
    u = tl.exp(-tl.abs(x))
    one_more = 1.0 + u
    log_one_more = tl.where(one_more == 1.0, u, u * tl.log(one_more) / tl.where(one_more == 1.0, 1.0, one_more - 1.0))
    return tl.maximum(x, 0.0) + log_one_more


@triton.jit
def find_row(starts_ptr, num_rows, tile, TILE: tl.constexpr):
    """The request whose tokens tile number `tile` covers.

    Request r gets tiles [starts[r] // TILE + r, starts[r + 1] // TILE + r + 1): enough for its tokens, at most one too
    many, and all of them together are T // TILE + R. So a grid of that size needs no table.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        is_at_or_behind = tl.load(starts_ptr + middle) // TILE + middle <= tile
        low = tl.where(is_at_or_behind, middle, low)
        high = tl.where(is_at_or_behind, high, middle)
    return low


@triton.jit
def first_in_tile(starts_ptr, row, tile, TILE: tl.constexpr):
    """The first token of a tile, counted from the first of its request."""
    return (tile - tl.load(starts_ptr + row) // TILE - row) * TILE


@triton.jit
def count_up_to(sorted_ptr, count, value):
    """How many of the sorted numbers are at most `value`."""
    low = 0
    high = count
    while low < high:
        middle = (low + high) // 2
        is_counted = tl.load(sorted_ptr + middle) <= value
        low = tl.where(is_counted, middle + 1, low)
        high = tl.where(is_counted, high, middle)
    return low
