"""Attention of single queries to keys that several requests share: read once, with the queries of all of them as rows.

A split's part goes where the request's own program would have put it, so that the merge needs to know of nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.attention.triton_decode import (
    is_covered,
    load_heads,
    load_rest,
    load_some_heads,
    lowest_seen,
    scores_of,
)


@triton.jit(do_not_specialize=["stride_table", "num_splits"])
def shared_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    part_ptr,
    lse_ptr,
    starts_ptr,
    num_keys_ptr,
    tables_ptr,
    tiles_ptr,
    num_splits,
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
    MEMBERS: tl.constexpr,
    TILE_MEMBERS: tl.constexpr,
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
    PRECISION: tl.constexpr,
):
    """MEMBERS requests of a tile, one kv head, one split of the keys that they share.

    Row r is member r // GROUP, head r % GROUP. part: float32 [R, H, num_splits, D] with lse [R, H, num_splits].
    """
    i_head = tl.program_id(1)
    PROGRAMS: tl.constexpr = (TILE_MEMBERS + MEMBERS - 1) // MEMBERS
    tile_ptr = tiles_ptr + tl.program_id(0) // PROGRAMS * (TILE_MEMBERS + 2)
    first_member = tl.program_id(0) % PROGRAMS * MEMBERS
    first_key, end_key = tl.load(tile_ptr), tl.load(tile_ptr + 1)
    start = (first_key // SPLIT + tl.program_id(2)) * SPLIT
    table_row = tl.load(tile_ptr + 2 + first_member)
    if start >= end_key or table_row < 0:
        return
    o_row, o_size, o_value = tl.arange(0, ROWS), tl.arange(0, PADDED), tl.arange(0, V_PADDED)
    o_member, o_head = first_member + o_row // GROUP, i_head * GROUP + o_row % GROUP
    is_member = (o_row < MEMBERS * GROUP) & (o_member < TILE_MEMBERS)
    row = tl.load(tile_ptr + 2 + o_member, mask=is_member, other=-1)
    is_member = row >= 0
    token = tl.load(starts_ptr + row, mask=is_member, other=0)
    num_queries = tl.load(starts_ptr + row + 1, mask=is_member, other=0) - token
    num_keys = tl.load(num_keys_ptr + row, mask=is_member, other=0)
    lowest = lowest_seen(num_keys - 1, window, chunk)
    is_member &= (num_queries == 1) & is_covered(start, SPLIT, first_key, end_key, lowest, num_keys)
    o_q = token.to(tl.int64) * stride_q_T + o_head * stride_q_H
    q = load_some_heads(q_ptr, o_q, o_size, is_member, SIZE)
    q_rest = load_rest(q_ptr, o_q, is_member, q, SIZE, PADDED, REST)
    largest = tl.full([ROWS], -1.0e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, V_PADDED], tl.float32)
    tables_ptr += table_row.to(tl.int64) * stride_table
    for first in range(start, start + SPLIT, TILE):
        position = first + tl.arange(0, TILE)
        is_key = position >= 0
        block, offset = tl.load(tables_ptr + position // BLOCK_SIZE).to(tl.int64), position % BLOCK_SIZE
        o_k = block * stride_k_B + offset * stride_k_P + i_head * stride_k_K
        o_v = block * stride_v_B + offset * stride_v_P + i_head * stride_v_K
        k = load_heads(k_ptr, o_k, o_size, is_key, SIZE, PADDED)
        k_rest = load_rest(k_ptr, o_k, is_key, k, SIZE, PADDED, REST)
        if IS_V_IN_K:
            v = k
        else:
            v = load_heads(v_ptr, o_v, o_value, is_key, V_SIZE, V_PADDED)
        scores = scores_of(q, k, q_rest, k_rest, scale, softcap, REST, HAS_CAP, PRECISION)
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
        largest = new_largest
    num_heads = tl.num_programs(1) * GROUP
    o_part = (row.to(tl.int64) * num_heads + o_head) * num_splits + start // SPLIT - lowest // SPLIT
    tl.store(lse_ptr + o_part, largest + tl.log2(total), mask=is_member)
    is_stored = is_member[:, None] & (o_value < V_SIZE)[None, :]
    tl.store(part_ptr + o_part[:, None] * V_SIZE + o_value[None, :], out / total[:, None], mask=is_stored)
