"""Mamba-2's scan (state space duality): pieces of each request as matrix products; single tokens by themselves.

Three launches over the pieces of Pieces: what each piece adds to the state, the states between the pieces, the
outputs. A piece ends wherever a state is captured, so the second launch holds exactly that state and stores it.

Sums of decays are in float64: over a piece they grow large while neighbours differ by little.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.triton_math import count_up_to, softplus


@triton.jit
def _step_sizes(dt, bias_ptr, i_head, dt_low, dt_high, HAS_BIAS: tl.constexpr):
    dt = dt.to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(bias_ptr + i_head).to(tl.float32)
    return tl.minimum(tl.maximum(softplus(dt), dt_low), dt_high)


@triton.jit
def piece_states_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    dt_bias_ptr,
    bounds_ptr,
    added_ptr,
    steps_ptr,
    decays_ptr,
    dt_low,
    dt_high,
    stride_x_T,
    stride_x_H,
    stride_dt_T,
    stride_dt_H,
    stride_b_T,
    stride_b_G,
    HEADS_IN_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    STATES_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """added [pieces, H, D, N]: the state behind a piece that begins with zeros; steps, decays [pieces, H, TOKENS]."""
    i_piece, i_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds_ptr + 2 * i_piece).to(tl.int64)
    num_tokens = tl.load(bounds_ptr + 2 * i_piece + 1)
    o_token, o_size, o_state = tl.arange(0, TOKENS), tl.arange(0, SIZE_PADDED), tl.arange(0, STATES_PADDED)
    is_token, is_size, is_state = o_token < num_tokens, o_size < SIZE, o_state < STATES
    o_dt = (first + o_token) * stride_dt_T + i_head * stride_dt_H
    dt = tl.load(dt_ptr + o_dt, mask=is_token, other=0.0)
    dt = tl.where(is_token, _step_sizes(dt, dt_bias_ptr, i_head, dt_low, dt_high, HAS_BIAS), 0.0)
    # Summed up; behind the piece's end it stays what it was there.
    decay = tl.cumsum(dt.to(tl.float64) * tl.load(a_ptr + i_head).to(tl.float64), 0)
    o_piece = i_piece.to(tl.int64) * tl.num_programs(1) + i_head
    tl.store(steps_ptr + o_piece * TOKENS + o_token, dt)
    tl.store(decays_ptr + o_piece * TOKENS + o_token, decay)
    end_decay = tl.sum(tl.where(o_token == TOKENS - 1, decay, 0.0), 0)
    shares = dt * tl.exp((end_decay - decay).to(tl.float32))
    o_x = (first + o_token)[:, None] * stride_x_T + i_head * stride_x_H + o_size[None, :]
    x = tl.load(x_ptr + o_x, mask=is_token[:, None] & is_size[None, :], other=0.0).to(tl.float32)
    o_b = (first + o_token)[:, None] * stride_b_T + i_head // HEADS_IN_GROUP * stride_b_G + o_state[None, :]
    b = tl.load(b_ptr + o_b, mask=is_token[:, None] & is_state[None, :], other=0.0).to(tl.float32)
    added = tl.dot(tl.trans(x * shares[:, None]), b, input_precision=PRECISION)
    o_added = (o_piece * SIZE + o_size)[:, None] * STATES + o_state[None, :]
    tl.store(added_ptr + o_added, added, mask=is_size[:, None] & is_state[None, :])


@triton.jit
def pass_states_kernel(
    added_ptr,
    decays_ptr,
    row_pieces_ptr,
    piece_slots_ptr,
    states_ptr,
    slots_ptr,
    has_history_ptr,
    stride_state,
    ELEMENTS: tl.constexpr,
    TOKENS: tl.constexpr,
    PROGRAM: tl.constexpr,
):
    """Walk a request's pieces: what a piece added becomes the state before it; captures and the last state are kept."""
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    num_heads = tl.num_programs(1)
    first_piece = tl.load(row_pieces_ptr + i_row).to(tl.int64)
    end_piece = tl.load(row_pieces_ptr + i_row + 1).to(tl.int64)
    if first_piece == end_piece:
        return
    o_element = tl.program_id(2) * PROGRAM + tl.arange(0, PROGRAM)
    is_element = o_element < ELEMENTS
    slot = tl.load(slots_ptr + i_row)
    has_history = tl.load(has_history_ptr + i_row) != 0
    state_ptr = states_ptr + i_head * ELEMENTS + o_element
    state = tl.load(state_ptr + slot * stride_state, mask=is_element & has_history, other=0.0)
    for piece in range(first_piece, end_piece):
        added_here_ptr = added_ptr + (piece * num_heads + i_head) * ELEMENTS + o_element
        added = tl.load(added_here_ptr, mask=is_element, other=0.0)
        decay = tl.load(decays_ptr + (piece * num_heads + i_head + 1) * TOKENS - 1).to(tl.float32)
        tl.store(added_here_ptr, state, mask=is_element)
        state = state * tl.exp(decay) + added
        target = tl.load(piece_slots_ptr + piece)
        tl.store(state_ptr + target * stride_state, state, mask=is_element & (target >= 0))
    tl.store(state_ptr + slot * stride_state, state, mask=is_element)


@triton.jit
def piece_outputs_kernel(
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    bounds_ptr,
    before_ptr,
    steps_ptr,
    decays_ptr,
    out_ptr,
    stride_x_T,
    stride_x_H,
    stride_b_T,
    stride_b_G,
    stride_c_T,
    stride_c_G,
    HEADS_IN_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    STATES_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What the state before the piece gives to each token, and what the piece's earlier tokens do."""
    i_piece, i_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds_ptr + 2 * i_piece).to(tl.int64)
    num_tokens = tl.load(bounds_ptr + 2 * i_piece + 1)
    o_token, o_size, o_state = tl.arange(0, TOKENS), tl.arange(0, SIZE_PADDED), tl.arange(0, STATES_PADDED)
    is_token, is_size, is_state = o_token < num_tokens, o_size < SIZE, o_state < STATES
    is_token_state = is_token[:, None] & is_state[None, :]
    o_piece = i_piece.to(tl.int64) * tl.num_programs(1) + i_head
    i_group = i_head // HEADS_IN_GROUP
    o_c = (first + o_token)[:, None] * stride_c_T + i_group * stride_c_G + o_state[None, :]
    c = tl.load(c_ptr + o_c, mask=is_token_state, other=0.0)
    decay = tl.load(decays_ptr + o_piece * TOKENS + o_token)
    o_before = (o_piece * SIZE + o_size)[:, None] * STATES + o_state[None, :]
    before = tl.load(before_ptr + o_before, mask=is_size[:, None] & is_state[None, :], other=0.0)
    out = tl.dot(c.to(tl.float32), tl.trans(before), input_precision=PRECISION)
    out *= tl.exp(decay.to(tl.float32))[:, None]
    o_b = (first + o_token)[:, None] * stride_b_T + i_group * stride_b_G + o_state[None, :]
    b = tl.load(b_ptr + o_b, mask=is_token_state, other=0.0)
    weights = tl.dot(c, tl.trans(b), input_precision=PRECISION)
    between = (decay[:, None] - decay[None, :]).to(tl.float32)
    is_earlier = o_token[None, :] <= o_token[:, None]
    steps = tl.load(steps_ptr + o_piece * TOKENS + o_token)
    weights = weights * tl.exp(tl.where(is_earlier, between, -1.0e30)) * steps[None, :]
    o_x = (first + o_token)[:, None] * stride_x_T + i_head * stride_x_H + o_size[None, :]
    is_token_size = is_token[:, None] & is_size[None, :]
    x = tl.load(x_ptr + o_x, mask=is_token_size, other=0.0).to(tl.float32)
    out = tl.dot(weights, x, out, input_precision=PRECISION)
    out += x * tl.load(d_ptr + i_head).to(tl.float32)
    o_out = ((first + o_token)[:, None] * tl.num_programs(1) + i_head) * SIZE + o_size[None, :]
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_token_size)


@triton.jit(do_not_specialize=["num_captures"])
def update_kernel(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    dt_bias_ptr,
    states_ptr,
    out_ptr,
    starts_ptr,
    slots_ptr,
    has_history_ptr,
    capture_ends_ptr,
    capture_slots_ptr,
    num_captures,
    dt_low,
    dt_high,
    stride_x_T,
    stride_x_H,
    stride_dt_T,
    stride_dt_H,
    stride_b_T,
    stride_b_G,
    stride_c_T,
    stride_c_G,
    stride_state,
    HEADS_IN_GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    STATES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SIZE_PROGRAM: tl.constexpr,
    STATES_PADDED: tl.constexpr,
    IS_SERIAL: tl.constexpr,
):
    """Requests with one token: one step of one head, read and written once.

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
    o_size = tl.program_id(2) * SIZE_PROGRAM + tl.arange(0, SIZE_PROGRAM)
    o_state = tl.arange(0, STATES_PADDED)
    is_size, is_state = o_size < SIZE, o_state < STATES
    is_inside = is_size[:, None] & is_state[None, :]
    o_inside = (i_head * SIZE + o_size)[:, None] * STATES + o_state[None, :]
    has_history = tl.load(has_history_ptr + i_row) != 0
    state = tl.load(states_ptr + slot * stride_state + o_inside, mask=is_inside & has_history, other=0.0)
    a, d = tl.load(a_ptr + i_head).to(tl.float32), tl.load(d_ptr + i_head).to(tl.float32)
    i_group = i_head // HEADS_IN_GROUP
    first_capture = count_up_to(capture_ends_ptr, num_captures, token)
    last_capture = count_up_to(capture_ends_ptr, num_captures, end)
    for capture in range(first_capture, last_capture + 1):
        piece_end = tl.load(capture_ends_ptr + capture, mask=capture < last_capture, other=end)
        target = tl.load(capture_slots_ptr + capture, mask=capture < last_capture, other=slot)
        for t in range(token, piece_end):
            dt = tl.load(dt_ptr + t * stride_dt_T + i_head * stride_dt_H)
            dt = _step_sizes(dt, dt_bias_ptr, i_head, dt_low, dt_high, HAS_BIAS)
            x = tl.load(x_ptr + t * stride_x_T + i_head * stride_x_H + o_size, mask=is_size, other=0.0).to(tl.float32)
            o_b, o_c = t * stride_b_T + i_group * stride_b_G, t * stride_c_T + i_group * stride_c_G
            b = tl.load(b_ptr + o_b + o_state, mask=is_state, other=0.0).to(tl.float32)
            c = tl.load(c_ptr + o_c + o_state, mask=is_state, other=0.0).to(tl.float32)
            state = state * tl.exp(dt * a) + (dt * x)[:, None] * b[None, :]
            out = tl.sum(state * c[None, :], 1) + x * d
            o_out = (t * tl.num_programs(1) + i_head) * SIZE + o_size
            tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_size)
        tl.debug_barrier()  # where few elements are held by many threads, all have read before one writes
        tl.store(states_ptr + target * stride_state + o_inside, state, mask=is_inside)
        token = piece_end
