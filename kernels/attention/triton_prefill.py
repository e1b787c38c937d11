"""Attention of requests with several queries: a tile of queries, its heads packed as rows, passes over its keys.

Keys that only some queries of the tile see are masked, in tiles at the beginning (a window's or chunk's edge) and at
the end (the diagonal); those between are seen by all and run without masks.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.attention.triton_decode import (
    LOG2_E,
    load_heads,
    load_rest,
    load_some_heads,
    lowest_seen,
    scores_of,
)
from hybrid_engine.kernels.triton_math import find_row, first_in_tile


@triton.jit(do_not_specialize=["num_rows", "stride_table"])
def prefill_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    sinks_ptr,
    out_ptr,
    starts_ptr,
    num_keys_ptr,
    tables_ptr,
    num_rows,
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
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    REST: tl.constexpr,
    V_SIZE: tl.constexpr,
    V_PADDED: tl.constexpr,
    IS_V_IN_K: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
    IS_EXACT: tl.constexpr,
):
    """QUERIES tokens of one request, HEADS of one kv head's GROUP query heads: row r is token r // HEADS.

    IS_EXACT: single queries too, so that a query is computed in one way wherever it stands.
    IS_V_IN_K: a value is the first V_SIZE elements of its key.
    """
    # The last tiles first: they have the most keys, and what starts last should be short.
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    i_tile, i_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1) // TILES
    i_row = find_row(starts_ptr, num_rows, i_tile, QUERIES)
    first_query = first_in_tile(starts_ptr, i_row, i_tile, QUERIES)
    token = tl.load(starts_ptr + i_row)
    num_queries = tl.load(starts_ptr + i_row + 1) - token
    if first_query >= num_queries:
        return
    if not IS_EXACT and num_queries == 1:  # the decode kernel's
        return
    num_before = tl.load(num_keys_ptr + i_row) - num_queries
    o_row = tl.arange(0, ROWS)
    o_query, o_in_group = first_query + o_row // HEADS, tl.program_id(1) % TILES * HEADS + o_row % HEADS
    o_size, o_value = tl.arange(0, PADDED), tl.arange(0, V_PADDED)
    is_row = (o_query < num_queries) & (o_row < QUERIES * HEADS) & (o_in_group < GROUP)
    o_head, o_token = i_head * GROUP + o_in_group, (token + o_query).to(tl.int64)
    o_q = o_token * stride_q_T + o_head * stride_q_H
    q = load_some_heads(q_ptr, o_q, o_size, is_row, SIZE)
    q_rest = load_rest(q_ptr, o_q, is_row, q, SIZE, PADDED, REST)
    position = num_before + o_query
    lowest = lowest_seen(position, window, chunk)
    first_position = num_before + first_query
    last_position = tl.minimum(first_position + QUERIES, num_before + num_queries) - 1
    # Keys [start, end) are seen by some query of the tile, tiles [all_start, all_end) of them by every one.
    start, end = lowest_seen(first_position, window, chunk), last_position + 1
    all_end = (first_position + 1) // TILE * TILE
    all_start = tl.minimum(tl.cdiv(lowest_seen(last_position, window, chunk), TILE) * TILE, all_end)
    tables_ptr += i_row.to(tl.int64) * stride_table
    if HAS_SINKS:
        largest = tl.load(sinks_ptr + o_head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
        total = tl.full([ROWS], 1.0, tl.float32)
    else:
        largest = tl.full([ROWS], -1.0e30, tl.float32)
        total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, V_PADDED], tl.float32)
    for part in tl.static_range(3):
        if part == 0:
            low, high = start // TILE * TILE, all_start
        elif part == 1:
            low, high = tl.maximum(start // TILE * TILE, all_start), all_end
        else:
            low, high = tl.maximum(start // TILE * TILE, all_end), end
        for first in range(low, high, TILE):
            o_key = first + tl.arange(0, TILE)
            if part == 1:
                block = tl.load(tables_ptr + o_key // BLOCK_SIZE).to(tl.int64)
                is_seen = o_key >= 0
            else:
                is_seen = (o_key >= start) & (o_key < end)
                block = tl.load(tables_ptr + o_key // BLOCK_SIZE, mask=is_seen, other=0).to(tl.int64)
            o_k = block * stride_k_B + o_key % BLOCK_SIZE * stride_k_P + i_head * stride_k_K
            o_v = block * stride_v_B + o_key % BLOCK_SIZE * stride_v_P + i_head * stride_v_K
            if part == 1:
                k = load_heads(k_ptr, o_k, o_size, is_seen, SIZE, PADDED)
            else:
                k = load_some_heads(k_ptr, o_k, o_size, is_seen, SIZE)
            k_rest = load_rest(k_ptr, o_k, is_seen, k, SIZE, PADDED, REST)
            if IS_V_IN_K:
                v = k
            elif part == 1:
                v = load_heads(v_ptr, o_v, o_value, is_seen, V_SIZE, V_PADDED)
            else:
                v = load_some_heads(v_ptr, o_v, o_value, is_seen, V_SIZE)
            scores = scores_of(q, k, q_rest, k_rest, scale, softcap, REST, HAS_CAP, PRECISION)
            if part != 1:
                is_visible = (o_key[None, :] >= lowest[:, None]) & (o_key[None, :] <= position[:, None])
                scores = tl.where(is_visible, scores, -1.0e30)
            new_largest = tl.maximum(largest, tl.max(scores, 1))
            weights = tl.exp2(scores - new_largest[:, None])
            shrink = tl.exp2(largest - new_largest)
            total = total * shrink + tl.sum(weights, 1)
            out = tl.dot(weights.to(v.dtype), v, out * shrink[:, None], input_precision=PRECISION)
            largest = new_largest
    out = out / total[:, None]
    o_out = (o_token * (tl.num_programs(1) // TILES * GROUP) + o_head)[:, None] * V_SIZE + o_value[None, :]
    is_stored = is_row[:, None] & (o_value < V_SIZE)[None, :]
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_stored)
