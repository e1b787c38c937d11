"""The causal convolution: outputs by tiles of tokens and channels, then the states; or one token of each at once.

Where tokens, states and captures lie is StateMeta's; a slot below 0 is nobody's.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import count_up_to, find_row, first_in_tile, silu


@triton.jit(do_not_specialize=["num_rows"])
def conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    slots_ptr,
    has_history_ptr,
    num_rows,
    num_channels,
    stride_x,
    stride_state,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Outputs of a tile; inputs before a request's first token come from its state, which stays as it is."""
    i_tile = tl.program_id(0)
    i_row = find_row(starts_ptr, num_rows, i_tile, TOKENS)
    first = first_in_tile(starts_ptr, i_row, i_tile, TOKENS)
    start = tl.load(starts_ptr + i_row).to(tl.int64)
    num_tokens = tl.load(starts_ptr + i_row + 1) - start
    if first >= num_tokens:
        return
    slot = tl.load(slots_ptr + i_row)
    has_history = tl.load(has_history_ptr + i_row) != 0
    o_token = first + tl.arange(0, TOKENS)[:, None]
    o_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[None, :]
    is_channel = o_channel < num_channels
    is_inside = (o_token < num_tokens) & is_channel
    out = tl.zeros([TOKENS, CHANNELS], tl.float32)
    if HAS_BIAS:
        out += tl.load(bias_ptr + o_channel, mask=is_channel, other=0.0).to(tl.float32)
    for tap in tl.static_range(WIDTH):
        o_input = o_token + tap - (WIDTH - 1)
        o_x = (start + o_input) * stride_x + o_channel
        b_input = tl.load(x_ptr + o_x, mask=is_inside & (o_input >= 0), other=0.0).to(tl.float32)
        if tap < WIDTH - 1:
            o_state = slot * stride_state + o_channel * (WIDTH - 1) + o_input + (WIDTH - 1)
            is_old = is_inside & (o_input < 0) & has_history
            b_input += tl.load(states_ptr + o_state, mask=is_old, other=0.0).to(tl.float32)
        out += b_input * tl.load(weight_ptr + o_channel * WIDTH + tap, mask=is_channel, other=0.0).to(tl.float32)
    if IS_SILU:
        out = silu(out)
    tl.store(out_ptr + (start + o_token) * num_channels + o_channel, out.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit(do_not_specialize=["num_captures"])
def conv_states_kernel(
    x_ptr,
    states_ptr,
    starts_ptr,
    slots_ptr,
    has_history_ptr,
    capture_ends_ptr,
    capture_slots_ptr,
    num_captures,
    num_channels,
    stride_x,
    stride_state,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """The last inputs before each capture of a request, then those before its next token, into their slots."""
    i_row = tl.program_id(0)
    start = tl.load(starts_ptr + i_row).to(tl.int64)
    end = tl.load(starts_ptr + i_row + 1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row)
    if slot < 0 or start == end:
        return
    has_history = tl.load(has_history_ptr + i_row) != 0
    o_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)[:, None]
    o_tap = tl.arange(0, PADDED)[None, :]
    is_inside = (o_channel < num_channels) & (o_tap < WIDTH - 1)
    first_capture = count_up_to(capture_ends_ptr, num_captures, start)
    last_capture = count_up_to(capture_ends_ptr, num_captures, end)
    for capture in range(first_capture, last_capture + 1):
        is_capture = capture < last_capture
        o_input = tl.load(capture_ends_ptr + capture, mask=is_capture, other=end) - (WIDTH - 1) + o_tap
        target = tl.load(capture_slots_ptr + capture, mask=is_capture, other=slot)
        is_new = is_inside & (o_input >= start)
        b_new = tl.load(x_ptr + o_input * stride_x + o_channel, mask=is_new, other=0.0)
        o_old = slot * stride_state + o_channel * (WIDTH - 1) + o_input - start + (WIDTH - 1)
        is_old = is_inside & (o_input < start) & has_history
        b_old = tl.load(states_ptr + o_old, mask=is_old, other=0.0)
        window = tl.where(is_new, b_new.to(states_ptr.dtype.element_ty), b_old)
        tl.debug_barrier()  # all of the old window is read before any of it is written
        tl.store(states_ptr + target * stride_state + o_channel * (WIDTH - 1) + o_tap, window, mask=is_inside)


@triton.jit(do_not_specialize=["num_captures"])
def conv_update_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
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
    stride_state,
    WIDTH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_SILU: tl.constexpr,
    CHANNELS: tl.constexpr,
    PADDED: tl.constexpr,
):
    """One token of each request: its outputs and its states in one go."""
    i_row = tl.program_id(0)
    token = tl.load(starts_ptr + i_row).to(tl.int64)
    end = tl.load(starts_ptr + i_row + 1).to(tl.int64)
    slot = tl.load(slots_ptr + i_row)
    if slot < 0 or token == end:
        return
    has_history = tl.load(has_history_ptr + i_row) != 0
    o_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    is_channel = o_channel < num_channels
    o_tap = tl.arange(0, PADDED)
    o_state = o_channel[:, None] * (WIDTH - 1) + o_tap[None, :]
    is_old = is_channel[:, None] & (o_tap < WIDTH - 1)[None, :] & has_history
    is_kept = is_channel[:, None] & (o_tap < WIDTH - 2)[None, :] & has_history
    b_old = tl.load(states_ptr + slot * stride_state + o_state, mask=is_old, other=0.0)
    b_kept = tl.load(states_ptr + slot * stride_state + o_state + 1, mask=is_kept, other=0.0)
    b_x = tl.load(x_ptr + token * stride_x + o_channel, mask=is_channel, other=0.0)
    o_weight = o_channel[:, None] * WIDTH + o_tap[None, :]
    is_weight = is_channel[:, None] & (o_tap < WIDTH - 1)[None, :]
    weight = tl.load(weight_ptr + o_weight, mask=is_weight, other=0.0).to(tl.float32)
    newest_weight = tl.load(weight_ptr + o_channel * WIDTH + WIDTH - 1, mask=is_channel, other=0.0).to(tl.float32)
    out = tl.sum(b_old.to(tl.float32) * weight, 1) + b_x.to(tl.float32) * newest_weight
    if HAS_BIAS:
        out += tl.load(bias_ptr + o_channel, mask=is_channel, other=0.0).to(tl.float32)
    if IS_SILU:
        out = silu(out)
    tl.store(out_ptr + token * num_channels + o_channel, out.to(out_ptr.dtype.element_ty), mask=is_channel)
    b_new = b_x.to(states_ptr.dtype.element_ty)[:, None]
    window = tl.where((o_tap == WIDTH - 2)[None, :], b_new, b_kept)
    first_capture = count_up_to(capture_ends_ptr, num_captures, token)
    last_capture = count_up_to(capture_ends_ptr, num_captures, end)
    tl.debug_barrier()  # all of the old window is read before any of it is written
    for capture in range(first_capture, last_capture + 1):
        target = tl.load(capture_slots_ptr + capture, mask=capture < last_capture, other=slot)
        tl.store(states_ptr + target * stride_state + o_state, window, mask=is_weight)
