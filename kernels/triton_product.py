"""A tile of a product with weights that are kept in the inputs' dtype or in fp8."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.runtime import driver


def capability(device: torch.device) -> int:
    """For which GPUs kernels are compiled: 90 is compute capability 9.0; 0 on a CPU, where Triton interprets them."""
    return 0 if device.type == "cpu" else int(driver.active.get_current_target().arch)


def knows_fp8(device: torch.device) -> bool:
    """Whether kernels take e4m3 as such; elsewhere they take its bytes. Triton's interpreter does."""
    return capability(device) not in range(1, 89)


@triton.jit
def widened(w, dtype: tl.constexpr):
    """Weights as numbers of a dtype: bytes are taken as e4m3, whose NaN nobody stores, for GPUs that don't know it."""
    if w.dtype == tl.uint8:
        # Sign and the other seven bits at the places they have in float32, whose exponents count from 127 instead of 7.
        bits = w.to(tl.int32)
        moved = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
        wide = (moved.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    else:
        wide = w.to(dtype)
    return wide


@triton.jit
def products(
    x_ptrs,
    w_ptrs,
    is_row,
    is_column,
    UP: tl.constexpr,
    INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x times w over all inputs, and x times the weights UP elements behind those, or twice the same if UP is 0.

    x_ptrs [TILE, DEPTH], w_ptrs [DEPTH, COLUMNS] stand at the first inputs.
    """
    o_depth = tl.arange(0, DEPTH)
    one = tl.zeros([TILE, COLUMNS], tl.float32)
    other = tl.zeros([TILE, COLUMNS], tl.float32)
    for first in range(0, INPUTS, DEPTH):
        is_depth = o_depth < (DEPTH if INPUTS % DEPTH == 0 else INPUTS - first)
        is_weight = is_depth[:, None] & is_column[None, :]
        x = tl.load(x_ptrs + first, mask=is_row[:, None] & is_depth[None, :], other=0.0)
        w = tl.load(w_ptrs + first, mask=is_weight, other=0.0)
        one = tl.dot(x, widened(w, x.dtype), one, input_precision=PRECISION)
        if UP > 0:
            w_up = tl.load(w_ptrs + UP + first, mask=is_weight, other=0.0)
            other = tl.dot(x, widened(w_up, x.dtype), other, input_precision=PRECISION)
    return one, other if UP > 0 else one
