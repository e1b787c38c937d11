"""The gated delta rule step by step: for requests with one token, or for all."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import count_up_to, softplus

KEY_EPS = tl.constexpr(1e-6)


@triton.jit
def _unit(x):
    return x * tl.rsqrt(tl.sum(x * x, 0) + KEY_EPS)


@triton.jit(do_not_specialize=["num_captures"])
def delta_update_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    b_ptr,
    a_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    slots_ptr,
    has_history_ptr,
    capture_ends_ptr,
    capture_slots_ptr,
    num_captures,
    beta_scale,
    query_scale,
    stride_q_T,
    stride_q_G,
    stride_k_T,
    stride_k_G,
    stride_v_T,
    stride_v_H,
    stride_dt_T,
    stride_dt_H,
    stride_b_T,
    stride_b_H,
    stride_state,
    HEADS_IN_GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    PROGRAM: tl.constexpr,
    IS_SERIAL: tl.constexpr,
):
    """One step of some columns of one head, read and written once; requests with several tokens are passed over.

    IS_SERIAL: requests with any number, step by step. The loop over tokens is cut where states are captured.
    """
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    token = tl.load(starts_ptr + i_row).to(tl.int64)
    end = tl.load(starts_ptr + i_row + 1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row)
    if slot < 0 or token == end:
        return
    if not IS_SERIAL and end - token != 1:
        return
    i_group = i_head // HEADS_IN_GROUP
    o_key = tl.arange(0, KEYS_PADDED)
    o_value = tl.program_id(2) * PROGRAM + tl.arange(0, PROGRAM)
    is_key, is_value = o_key < KEYS, o_value < VALUES
    is_inside = is_key[:, None] & is_value[None, :]
    o_inside = (i_head * KEYS + o_key)[:, None] * VALUES + o_value[None, :]
    has_history = tl.load(has_history_ptr + i_row) != 0
    state = tl.load(states_ptr + slot * stride_state + o_inside, mask=is_inside & has_history, other=0.0)
    a = tl.load(a_ptr + i_head).to(tl.float32)
    first_capture = count_up_to(capture_ends_ptr, num_captures, token)
    last_capture = count_up_to(capture_ends_ptr, num_captures, end)
    for capture in range(first_capture, last_capture + 1):
        piece_end = tl.load(capture_ends_ptr + capture, mask=capture < last_capture, other=end)
        target = tl.load(capture_slots_ptr + capture, mask=capture < last_capture, other=slot)
        for t in range(token, piece_end):
            o_q, o_k = t * stride_q_T + i_group * stride_q_G, t * stride_k_T + i_group * stride_k_G
            o_v, o_dt = t * stride_v_T + i_head * stride_v_H, t * stride_dt_T + i_head * stride_dt_H
            q = tl.load(q_ptr + o_q + o_key, mask=is_key, other=0.0).to(tl.float32)
            k = tl.load(k_ptr + o_k + o_key, mask=is_key, other=0.0).to(tl.float32)
            v = tl.load(v_ptr + o_v + o_value, mask=is_value, other=0.0).to(tl.float32)
            beta = beta_scale * tl.sigmoid(tl.load(b_ptr + t * stride_b_T + i_head * stride_b_H).to(tl.float32))
            if IS_BY_ROW:
                dt = tl.load(dt_ptr + o_dt + o_key, mask=is_key, other=0.0).to(tl.float32)
                if HAS_BIAS:
                    dt += tl.load(dt_bias_ptr + i_head * KEYS + o_key, mask=is_key, other=0.0).to(tl.float32)
                state *= tl.exp(a * softplus(dt))[:, None]
            else:
                dt = tl.load(dt_ptr + o_dt).to(tl.float32)
                if HAS_BIAS:
                    dt += tl.load(dt_bias_ptr + i_head).to(tl.float32)
                state *= tl.exp(a * softplus(dt))
            q, k = _unit(q) * query_scale, _unit(k)
            delta = beta * (v - tl.sum(state * k[:, None], 0))
            state += k[:, None] * delta[None, :]
            out = tl.sum(state * q[:, None], 0)
            o_out = (t * tl.num_programs(1) + i_head) * VALUES + o_value
            tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_value)
        tl.debug_barrier()  # where few elements are held by many threads, all have read before one writes
        tl.store(states_ptr + target * stride_state + o_inside, state, mask=is_inside)
        token = piece_end
