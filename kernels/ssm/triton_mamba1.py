"""Mamba-1's selective scan: a program takes some channels of one request through its tokens, states in registers."""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import count_up_to, silu, softplus

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit(do_not_specialize=["num_captures"])
def mamba1_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    z_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    slots_ptr,
    has_history_ptr,
    capture_ends_ptr,
    capture_slots_ptr,
    num_captures,
    num_channels,
    stride_x,
    stride_dt,
    stride_b,
    stride_c,
    stride_z,
    stride_state,
    NUM_STATES: tl.constexpr,
    HAS_Z: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The loop over tokens is cut where states are captured; the last piece ends at the working slot."""
    i_row = tl.program_id(0)
    token = tl.load(starts_ptr + i_row).to(tl.int64)
    end = tl.load(starts_ptr + i_row + 1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row)
    if slot < 0 or token == end:
        return
    o_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    o_state = tl.arange(0, PADDED)
    is_channel, is_state = o_channel < num_channels, o_state < NUM_STATES
    is_inside = is_channel[:, None] & is_state[None, :]
    o_inside = o_channel[:, None] * NUM_STATES + o_state[None, :]
    a = tl.load(a_ptr + o_inside, mask=is_inside, other=0.0).to(tl.float32) * LOG2_E
    d = tl.load(d_ptr + o_channel, mask=is_channel, other=0.0).to(tl.float32)
    bias = tl.zeros([CHANNELS], tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias_ptr + o_channel, mask=is_channel, other=0.0).to(tl.float32)
    has_history = tl.load(has_history_ptr + i_row) != 0
    state = tl.load(states_ptr + slot * stride_state + o_inside, mask=is_inside & has_history, other=0.0)
    first_capture = count_up_to(capture_ends_ptr, num_captures, token)
    last_capture = count_up_to(capture_ends_ptr, num_captures, end)
    for capture in range(first_capture, last_capture + 1):
        is_capture = capture < last_capture
        piece_end = tl.load(capture_ends_ptr + capture, mask=is_capture, other=end)
        target = tl.load(capture_slots_ptr + capture, mask=is_capture, other=slot)
        for t in range(token, piece_end):
            x = tl.load(x_ptr + t * stride_x + o_channel, mask=is_channel, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + t * stride_dt + o_channel, mask=is_channel, other=0.0).to(tl.float32)
            b = tl.load(b_ptr + t * stride_b + o_state, mask=is_state, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + t * stride_c + o_state, mask=is_state, other=0.0).to(tl.float32)
            dt = softplus(dt + bias)
            state = state * tl.exp2(a * dt[:, None]) + (dt * x)[:, None] * b[None, :]
            y = tl.sum(state * c[None, :], 1) + d * x
            if HAS_Z:
                y *= silu(tl.load(z_ptr + t * stride_z + o_channel, mask=is_channel, other=0.0).to(tl.float32))
            tl.store(out_ptr + t * num_channels + o_channel, y.to(out_ptr.dtype.element_ty), mask=is_channel)
        tl.debug_barrier()  # where few elements are held by many threads, all have read before one writes
        tl.store(states_ptr + target * stride_state + o_inside, state, mask=is_inside)
        token = piece_end
