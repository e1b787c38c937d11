"""A mixture of experts: rows sorted by expert and cut into tiles on the GPU, two products over the tiles, a sum.

A pair is a token and one of its experts: pair p is token p // CHOSEN, place p % CHOSEN. A row is a pair's place once
they are sorted by expert, those of one expert in their own order. A tile is up to TILE rows of one expert. How many
there are nobody knows on the host: there is room for all that there can be, and programs without a tile end at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import gated
from hybrid_engine.kernels.triton_product import products


@triton.jit(do_not_specialize=["num_pairs"])
def count_kernel(experts_ptr, counts_ptr, num_pairs, PAIRS: tl.constexpr):
    """counts [X]: the pairs of each expert, one a program."""
    i_expert = tl.program_id(0)
    count = tl.zeros([PAIRS], tl.int32)
    for first in range(0, num_pairs, PAIRS):
        o_pair = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts_ptr + o_pair, mask=o_pair < num_pairs, other=-1).to(tl.int32)
        count += (chosen == i_expert).to(tl.int32)
    tl.store(counts_ptr + i_expert, tl.sum(count, 0))


@triton.jit(do_not_specialize=["num_pairs", "num_tiles"])
def place_kernel(
    experts_ptr,
    counts_ptr,
    pairs_ptr,
    tiles_ptr,
    num_pairs,
    num_tiles,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
    TILE: tl.constexpr,
):
    """pairs [rows]: the pair of each row; tiles [tiles, 3]: expert, first row, row behind the last; one expert each."""
    i_expert = tl.program_id(0)
    o_expert = tl.arange(0, PADDED)
    before = tl.load(counts_ptr + o_expert, mask=o_expert < i_expert, other=0)
    count = tl.load(counts_ptr + i_expert)
    start = tl.sum(before, 0)
    tile = tl.sum((before + TILE - 1) // TILE, 0)
    for first in range(0, count, TILE):
        o_tile = tiles_ptr + 3 * (tile + first // TILE)
        tl.store(o_tile, i_expert)
        tl.store(o_tile + 1, start + first)
        tl.store(o_tile + 2, start + tl.minimum(first + TILE, count))
    if i_expert == EXPERTS - 1:
        for empty in range(tile + tl.cdiv(count, TILE), num_tiles):
            tl.store(tiles_ptr + 3 * empty + 1, 0)
            tl.store(tiles_ptr + 3 * empty + 2, 0)
    for first in range(0, num_pairs, PAIRS):
        o_pair = first + tl.arange(0, PAIRS)
        chosen = tl.load(experts_ptr + o_pair, mask=o_pair < num_pairs, other=-1).to(tl.int32)
        is_mine = chosen == i_expert
        place = tl.cumsum(is_mine.to(tl.int32), 0)
        tl.store(pairs_ptr + start + place - 1, o_pair, mask=is_mine)
        start += tl.sum(is_mine.to(tl.int32), 0)


@triton.jit
def gate_up_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    weights_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    alpha,
    limit,
    stride_x,
    CHOSEN: tl.constexpr,
    INPUTS: tl.constexpr,
    INNER: tl.constexpr,
    KIND: tl.constexpr,
    IS_GATED: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WEIGHS_INPUTS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [rows, I]: what goes into the second product. w [X, N, K]: the gates' rows before the ups'."""
    i_tile = tl.program_id(0)
    first_row, end_row = tl.load(tiles_ptr + 3 * i_tile + 1), tl.load(tiles_ptr + 3 * i_tile + 2)
    if first_row == end_row:
        return
    expert = tl.load(tiles_ptr + 3 * i_tile).to(tl.int64)
    o_row = first_row + tl.arange(0, TILE)
    is_row = o_row < end_row
    pair = tl.load(pairs_ptr + o_row, mask=is_row, other=0)
    o_column, o_depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    is_column = o_column < INNER
    o_out = expert * (INNER * (1 + IS_GATED)) + o_column
    x_ptrs = x_ptr + (pair // CHOSEN).to(tl.int64)[:, None] * stride_x + o_depth[None, :]
    w_ptrs = w_ptr + o_out[None, :] * INPUTS + o_depth[:, None]
    UP: tl.constexpr = INNER * INPUTS if IS_GATED else 0
    gate, up = products(x_ptrs, w_ptrs, is_row, is_column, UP, INPUTS, TILE, COLUMNS, DEPTH, PRECISION)
    if HAS_SCALES:
        gate *= tl.load(scales_ptr + o_out, mask=is_column, other=0.0)[None, :]
        if IS_GATED:
            up *= tl.load(scales_ptr + o_out + INNER, mask=is_column, other=0.0)[None, :]
    if WEIGHS_INPUTS:
        weight = tl.load(weights_ptr + pair, mask=is_row, other=0.0)[:, None]
        gate *= weight
        up *= weight
    if HAS_BIAS:
        gate += tl.load(bias_ptr + o_out, mask=is_column, other=0.0)[None, :]
        if IS_GATED:
            up += tl.load(bias_ptr + o_out + INNER, mask=is_column, other=0.0)[None, :]
    hidden = gated(gate, up, alpha, limit, KIND)
    o_hidden = o_row.to(tl.int64)[:, None] * INNER + o_column[None, :]
    tl.store(out_ptr + o_hidden, hidden.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def down_kernel(
    x_ptr,
    w_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    pairs_ptr,
    tiles_ptr,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """out [pairs, E]: what each pair's expert gives. x [rows, I], w [X, E, I]."""
    i_tile = tl.program_id(0)
    first_row, end_row = tl.load(tiles_ptr + 3 * i_tile + 1), tl.load(tiles_ptr + 3 * i_tile + 2)
    if first_row == end_row:
        return
    expert = tl.load(tiles_ptr + 3 * i_tile).to(tl.int64)
    o_row = first_row + tl.arange(0, TILE)
    is_row = o_row < end_row
    o_column, o_depth = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, DEPTH)
    is_column = o_column < OUTPUTS
    o_weight = expert * OUTPUTS + o_column
    x_ptrs = x_ptr + o_row.to(tl.int64)[:, None] * INPUTS + o_depth[None, :]
    w_ptrs = w_ptr + o_weight[None, :] * INPUTS + o_depth[:, None]
    out, _ = products(x_ptrs, w_ptrs, is_row, is_column, 0, INPUTS, TILE, COLUMNS, DEPTH, PRECISION)
    if HAS_SCALES:
        out *= tl.load(scales_ptr + o_weight, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        out += tl.load(bias_ptr + o_weight, mask=is_column, other=0.0)[None, :]
    pair = tl.load(pairs_ptr + o_row, mask=is_row, other=0).to(tl.int64)
    o_pair = pair[:, None] * OUTPUTS + o_column[None, :]
    tl.store(out_ptr + o_pair, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def sum_kernel(
    by_pair_ptr,
    weights_ptr,
    out_ptr,
    CHOSEN: tl.constexpr,
    OUTPUTS: tl.constexpr,
    IS_WEIGHED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """out [T, E]: a token's pairs, each times its weight, added up in their order."""
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = o_column < OUTPUTS
    total = tl.zeros([COLUMNS], tl.float32)
    for place in range(CHOSEN):
        pair = i_token * CHOSEN + place
        one = tl.load(by_pair_ptr + pair * OUTPUTS + o_column, mask=is_column, other=0.0).to(tl.float32)
        if IS_WEIGHED:
            one *= tl.load(weights_ptr + pair)
        total += one
    tl.store(out_ptr + i_token * OUTPUTS + o_column, total.to(out_ptr.dtype.element_ty), mask=is_column)
