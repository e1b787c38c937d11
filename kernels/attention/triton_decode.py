"""Attention of requests with one query: the keys are split among programs and the parts merged.

Splits lie at fixed multiples of a fixed size, whatever else is in the batch: a request's result never depends on its
neighbours. Scores are in units of log2, so that exp2 does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import tanh

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def lowest_seen(position, window, chunk):
    """The first key that the query at a position sees."""
    return tl.maximum(tl.maximum(position - window + 1, position // chunk * chunk), 0)


@triton.jit
def is_covered(start, SPLIT: tl.constexpr, first_key, end_key, lowest, num_keys):
    """Whether a request's split from `start` on is computed with others', for whom it shares keys up to end_key.

    One that the query sees in part is not.
    """
    return (start >= tl.maximum(first_key, lowest)) & (start + SPLIT <= tl.minimum(end_key, num_keys))


@triton.jit
def load_rest(ptr, o_row, is_row, whole, SIZE: tl.constexpr, PADDED: tl.constexpr, REST: tl.constexpr):
    """The elements of each row from PADDED on, REST of them: a head of 576 is taken as 512 and 64.

    `whole`, the elements before, where there are no others.
    """
    rest = whole
    if REST > 0:
        o_rest = PADDED + tl.arange(0, REST)
        is_rest = is_row[:, None] & (o_rest < SIZE)[None, :]
        rest = tl.load(ptr + o_row[:, None] + o_rest[None, :], mask=is_rest, other=0.0)
    return rest


@triton.jit
def load_some_heads(ptr, o_row, o_size, is_row, SIZE: tl.constexpr):
    """Rows of which some don't exist: zeros."""
    return tl.load(ptr + o_row[:, None] + o_size[None, :], mask=is_row[:, None] & (o_size < SIZE)[None, :], other=0.0)


@triton.jit
def load_heads(ptr, o_row, o_size, is_row, SIZE: tl.constexpr, PADDED: tl.constexpr):
    """Rows that all exist: with a mask, which is all true, only where heads don't fill the tile."""
    if SIZE >= PADDED:
        heads = tl.load(ptr + o_row[:, None] + o_size[None, :])
    else:
        heads = load_some_heads(ptr, o_row, o_size, is_row, SIZE)
    return heads


@triton.jit
def scores_of(q, k, q_rest, k_rest, scale, softcap, REST: tl.constexpr, HAS_CAP: tl.constexpr, PRECISION: tl.constexpr):
    """Scores of a tile of queries [M, D] and keys [N, D], in two parts, capped and in units of log2."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if REST > 0:
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision=PRECISION)
    scores *= scale
    if HAS_CAP:
        scores = softcap * tanh(scores / softcap)
    return scores * LOG2_E


@triton.jit(do_not_specialize=["stride_table"])
def decode_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    lse_ptr,
    starts_ptr,
    num_keys_ptr,
    tables_ptr,
    spans_ptr,
    scale,
    softcap,
    window,
    chunk,
    stride_q_T,
    stride_q_H,
    stride_k_B,
    stride_k_K,
    stride_k_P,
    stride_v_B,
    stride_v_K,
    stride_v_P,
    stride_table,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_PADDED: tl.constexpr,
    IS_V_IN_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One request, one kv head with HEADS of its GROUP query heads, one split of the keys.

    IS_V_IN_K: a value is the first V_SIZE elements of its key. HAS_SHARED: spans [R, 2] says which keys are
    shared_kernel's. part: float32 [R, H, splits, D] with lse [R, H, splits]; or, IS_WHOLE, the result [T, H, D] itself.
    """
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    i_row, i_head, i_split = tl.program_id(0), tl.program_id(1) // TILES, tl.program_id(2)
    token = tl.load(starts_ptr + i_row).to(tl.int64)
    if tl.load(starts_ptr + i_row + 1) - token != 1:
        return
    num_keys = tl.load(num_keys_ptr + i_row)
    lowest = lowest_seen(num_keys - 1, window, chunk)
    split_start = (lowest // SPLIT + i_split) * SPLIT
    start, end = tl.maximum(split_start, lowest), tl.minimum(split_start + SPLIT, num_keys)
    o_row, o_size, o_value = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, V_PADDED)
    o_in_group = tl.program_id(1) % TILES * HEADS + o_row
    is_head = (o_row < HEADS) & (o_in_group < GROUP)
    o_head = i_head * GROUP + o_in_group
    o_q = token * stride_q_T + o_head * stride_q_H
    q = load_some_heads(q_ptr, o_q, o_size, is_head, SIZE)
    q_rest = load_rest(q_ptr, o_q, is_head, q, SIZE, PADDED, REST)
    if HAS_SHARED:
        first_shared, end_shared = tl.load(spans_ptr + 2 * i_row), tl.load(spans_ptr + 2 * i_row + 1)
        if is_covered(split_start, SPLIT, first_shared, end_shared, lowest, num_keys):
            return
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, V_PADDED], tl.float32)
    for first in range(start // TILE * TILE, end, TILE):
        position = first + tl.arange(0, TILE)
        is_seen = (position >= start) & (position < end)
        block = tl.load(tables_ptr + i_row.to(tl.int64) * stride_table + position // BLOCK_SIZE, mask=is_seen, other=0)
        block, offset = block.to(tl.int64), position % BLOCK_SIZE
        o_k = block * stride_k_B + offset * stride_k_P + i_head * stride_k_K
        k = load_some_heads(k_ptr, o_k, o_size, is_seen, SIZE)
        k_rest = load_rest(k_ptr, o_k, is_seen, k, SIZE, PADDED, REST)
        scores = scores_of(q, k, q_rest, k_rest, scale, softcap, REST, HAS_CAP, PRECISION)
        scores = tl.where(is_seen[None, :], scores, -1.0e30)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        if IS_V_IN_K:
            v = k
        else:
            o_v = block * stride_v_B + offset * stride_v_P + i_head * stride_v_K
            v = load_some_heads(v_ptr, o_v, o_value, is_seen, V_SIZE)
        out = out * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    # A split without keys has no weight; its part is not read.
    is_empty = start >= end
    total = tl.where(is_empty, 1.0, total)
    part = out / total[:, None]
    num_heads = tl.num_programs(1) // TILES * GROUP
    if IS_WHOLE:
        o_part = token * num_heads + o_head
    else:
        o_part = (i_row.to(tl.int64) * num_heads + o_head) * tl.num_programs(2) + i_split
        tl.store(lse_ptr + o_part, tl.where(is_empty, float("-inf"), largest + tl.log2(total)), mask=is_head)
    is_stored = is_head[:, None] & (o_value < V_SIZE)[None, :]
    o_part = o_part[:, None] * V_SIZE + o_value[None, :]
    tl.store(part_ptr + o_part, part.to(part_ptr.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=["num_splits"])
def merge_kernel(
    part_ptr,
    lse_ptr,
    sinks_ptr,
    starts_ptr,
    out_ptr,
    num_splits,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    TILE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """One request and head: its parts [splits, D] weighed by their shares of the softmax."""
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts_ptr + i_row).to(tl.int64)
    if tl.load(starts_ptr + i_row + 1) - token != 1:
        return
    o_size = tl.arange(0, PADDED)
    o_first = (i_row.to(tl.int64) * NUM_HEADS + i_head) * num_splits
    largest = -1.0e30
    total = 0.0
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + i_head).to(tl.float32) * LOG2_E
        total = 1.0
    out = tl.zeros([PADDED], tl.float32)
    for first in range(0, num_splits, TILE):
        o_split = first + tl.arange(0, TILE)
        lse = tl.load(lse_ptr + o_first + o_split, mask=o_split < num_splits, other=float("-inf"))
        has_keys = lse != float("-inf")
        o_part = (o_first + o_split)[:, None] * SIZE + o_size[None, :]
        parts = tl.load(part_ptr + o_part, mask=has_keys[:, None] & (o_size < SIZE)[None, :], other=0.0)
        new_largest = tl.maximum(largest, tl.max(lse, 0))
        shares = tl.exp2(lse - new_largest)
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(shares, 0)
        out = out * shrink + tl.sum(parts * shares[:, None], 0)
        largest = new_largest
    out = out / tl.where(total == 0.0, 1.0, total)
    o_out = (token * NUM_HEADS + i_head) * SIZE + o_size
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=o_size < SIZE)
