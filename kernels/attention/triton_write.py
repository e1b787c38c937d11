"""What is stored into the blocks: keys and values, fresh ones from a packed projection, copies of whole blocks."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def write_kernel(
    k_ptr,
    v_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slots_ptr,
    stride_k_T,
    stride_k_K,
    stride_k_D,
    stride_v_T,
    stride_v_K,
    stride_v_D,
    stride_kc_B,
    stride_kc_K,
    stride_kc_P,
    stride_vc_B,
    stride_vc_K,
    stride_vc_P,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One token's keys and values of all heads. A token whose slot is below 0 is no token: nothing is written."""
    i_token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + i_token)
    o_head = tl.arange(0, HEADS)[:, None]
    o_size = tl.arange(0, PADDED)[None, :]
    is_head = (o_head < NUM_HEADS) & (slot >= 0)
    is_key, is_value = is_head & (o_size < SIZE), is_head & (o_size < V_SIZE)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    k = tl.load(k_ptr + i_token * stride_k_T + o_head * stride_k_K + o_size * stride_k_D, mask=is_key)
    v = tl.load(v_ptr + i_token * stride_v_T + o_head * stride_v_K + o_size * stride_v_D, mask=is_value)
    o_k = block * stride_kc_B + o_head * stride_kc_K + offset * stride_kc_P + o_size
    o_v = block * stride_vc_B + o_head * stride_vc_K + offset * stride_vc_P + o_size
    tl.store(k_cache_ptr + o_k, k, mask=is_key)
    tl.store(v_cache_ptr + o_v, v, mask=is_value)


@triton.jit
def qkv_norm_rope_write_kernel(
    qkv_ptr,
    q_norm_ptr,
    k_norm_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    q_ptr,
    k_cache_ptr,
    v_cache_ptr,
    eps,
    stride_qkv,
    stride_kc_B,
    stride_kc_K,
    stride_kc_P,
    stride_vc_B,
    stride_vc_K,
    stride_vc_P,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    V_SIZE: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    IS_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """Some of one token's head rows: queries, then keys, then values.

    Element i of a rotary head turns with element i +- ROTARY / 2; both are loaded, so nothing is exchanged.
    """
    i_token = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    o_size = tl.arange(0, PADDED)
    is_turned = o_size < ROTARY
    o_other = tl.where(o_size < ROTARY // 2, o_size + ROTARY // 2, o_size - ROTARY // 2)
    o_other = tl.where(is_turned, o_other, o_size)
    is_query = o_row < HEADS
    is_key = (o_row >= HEADS) & (o_row < HEADS + KV_HEADS)
    is_value = (o_row >= HEADS + KV_HEADS) & (o_row < HEADS + 2 * KV_HEADS)
    if V_SIZE == SIZE:
        o_qkv = o_row * SIZE
        is_inside = (is_query | is_key | is_value)[:, None] & (o_size < SIZE)[None, :]
    else:
        values = HEADS + KV_HEADS
        o_qkv = tl.where(is_value, values * SIZE + (o_row - values) * V_SIZE, o_row * SIZE)
        is_inside = (is_query | is_key)[:, None] & (o_size < SIZE)[None, :]
        is_inside |= is_value[:, None] & (o_size < V_SIZE)[None, :]
    row_ptr = qkv_ptr + i_token * stride_qkv + o_qkv[:, None]
    raw = tl.load(row_ptr + o_size[None, :], mask=is_inside, other=0.0)
    x = raw.to(tl.float32)
    is_turning = is_inside & (is_query | is_key)[:, None]
    other = tl.load(row_ptr + o_other[None, :], mask=is_turning, other=0.0).to(tl.float32)
    if HAS_Q_NORM or HAS_K_NORM:
        norm = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        normed, other_normed = x * norm, other * norm
    if HAS_Q_NORM:
        weight = tl.load(q_norm_ptr + o_size, mask=o_size < SIZE, other=0.0).to(tl.float32)
        other_weight = tl.load(q_norm_ptr + o_other, mask=o_size < SIZE, other=0.0).to(tl.float32)
        if IS_CENTERED:
            weight, other_weight = weight + 1.0, other_weight + 1.0
        x = tl.where(is_query[:, None], normed * weight[None, :], x)
        other = tl.where(is_query[:, None], other_normed * other_weight[None, :], other)
    if HAS_K_NORM:
        weight = tl.load(k_norm_ptr + o_size, mask=o_size < SIZE, other=0.0).to(tl.float32)
        other_weight = tl.load(k_norm_ptr + o_other, mask=o_size < SIZE, other=0.0).to(tl.float32)
        if IS_CENTERED:
            weight, other_weight = weight + 1.0, other_weight + 1.0
        x = tl.where(is_key[:, None], normed * weight[None, :], x)
        other = tl.where(is_key[:, None], other_normed * other_weight[None, :], other)
    cos = tl.load(cos_ptr + i_token * ROTARY + o_size, mask=is_turned, other=1.0)
    sin = tl.load(sin_ptr + i_token * ROTARY + o_size, mask=is_turned, other=0.0)
    sin = tl.where(o_size < ROTARY // 2, -sin, sin)
    turned = (x * cos[None, :] + other * sin[None, :]).to(q_ptr.dtype.element_ty)
    o_q = (i_token * HEADS + o_row[:, None]) * SIZE + o_size[None, :]
    tl.store(q_ptr + o_q, turned, mask=is_inside & is_query[:, None])
    slot = tl.load(slots_ptr + i_token)
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    is_written = is_inside & (slot >= 0)
    o_k = block * stride_kc_B + (o_row - HEADS)[:, None] * stride_kc_K + offset * stride_kc_P + o_size[None, :]
    tl.store(k_cache_ptr + o_k, turned, mask=is_written & is_key[:, None])
    o_v = block * stride_vc_B + (o_row - HEADS - KV_HEADS)[:, None] * stride_vc_K + offset * stride_vc_P
    tl.store(v_cache_ptr + o_v + o_size[None, :], raw, mask=is_written & is_value[:, None])


@triton.jit
def copy_kernel(
    cache_ptr,
    copies_ptr,
    stride_B,
    stride_K,
    stride_P,
    SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLOTS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The first slots of one block, one head. copies: int64 [n, 3], source, target, slots; no target is a source."""
    copy_ptr = copies_ptr + 3 * tl.program_id(0)
    source, target, num_slots = tl.load(copy_ptr), tl.load(copy_ptr + 1), tl.load(copy_ptr + 2)
    o_slot, o_size = tl.arange(0, SLOTS)[:, None], tl.arange(0, PADDED)[None, :]
    is_copied = (o_slot < num_slots) & (o_slot < BLOCK_SIZE) & (o_size < SIZE)
    o_element = tl.program_id(1) * stride_K + o_slot * stride_P + o_size
    found = tl.load(cache_ptr + source * stride_B + o_element, mask=is_copied)
    tl.store(cache_ptr + target * stride_B + o_element, found, mask=is_copied)
