"""The gated delta rule by pieces of a request, as matrix products.

Token i of a piece writes d_i, which depends on what the tokens before it wrote. With S, the state before the piece:
d_i + beta_i sum over j < i of (k_i decay_ij k_j) d_j = beta_i (v_i - k_i decay_i S).
The matrix on the left, with ones on its diagonal, depends on keys alone. Three launches: its inverse, applied to values
and keys, for all pieces at once; the states from piece to piece, which turns values into what is written; the outputs.
A piece ends wherever a state is captured, so the second launch holds exactly that state and stores it.

Where each row of a state has a decay of its own, decay_ij is a factor inside the product of two keys. Split between
them at a token in between, neither part grows: such a token is the first of every sixteen rows, for all columns before
it. Columns of the same sixteen are summed up one by one.

Source: Gated Delta Networks, arXiv 2412.06464, section 3.3. Sums of decays are in float64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hybrid_engine.kernels.ssm.triton_delta import KEY_EPS
from hybrid_engine.kernels.triton_math import softplus

BLOCK = tl.constexpr(16)
"""Rows of the blocks in which a matrix is inverted."""


@triton.jit
def _unit_rows(x):
    return x * tl.rsqrt(tl.sum(x * x, 1) + KEY_EPS)[:, None]


@triton.jit
def _invert(matrix_ptr, inverse_ptr, TOKENS: tl.constexpr):
    """Of a lower triangular matrix with ones on its diagonal, of which what is below it is stored.

    Blocks on the diagonal row by row, all at once; then those beside it, from the diagonal outwards.
    """
    NUM_BLOCKS: tl.constexpr = TOKENS // BLOCK
    o_block, o_row = tl.arange(0, NUM_BLOCKS), tl.arange(0, BLOCK)
    o_first = o_block * BLOCK * (TOKENS + 1)
    o_diagonal = o_first[:, None, None] + o_row[None, :, None] * TOKENS + o_row[None, None, :]
    below = tl.load(matrix_ptr + o_diagonal)
    is_row = o_row[None, :, None]
    inverse = tl.where(is_row == o_row[None, None, :], 1.0, 0.0) + tl.zeros([NUM_BLOCKS, BLOCK, BLOCK], tl.float32)
    for row in range(1, BLOCK):
        weights = tl.sum(tl.where(is_row == row, below, 0.0), 1)
        known = tl.sum(weights[:, :, None] * inverse, 1)
        inverse = tl.where(is_row == row, inverse - known[:, None, :], inverse)
    tl.store(inverse_ptr + o_diagonal, inverse)
    tl.debug_barrier()
    o_inside = o_row[:, None] * TOKENS + o_row[None, :]
    for distance in tl.static_range(1, NUM_BLOCKS):
        for row in tl.static_range(distance, NUM_BLOCKS):
            total = tl.zeros([BLOCK, BLOCK], tl.float32)
            for middle in tl.static_range(row - distance, row):
                left = tl.load(matrix_ptr + (row * TOKENS + middle) * BLOCK + o_inside)
                right = tl.load(inverse_ptr + (middle * TOKENS + row - distance) * BLOCK + o_inside)
                total = tl.dot(left, right, total, input_precision="tf32x3")
            own = tl.load(inverse_ptr + row * BLOCK * (TOKENS + 1) + o_inside)
            block = -tl.dot(own, total, input_precision="tf32x3")
            tl.store(inverse_ptr + (row * TOKENS + row - distance) * BLOCK + o_inside, block)
        tl.debug_barrier()


@triton.jit
def _decays(
    dt, bias_ptr, a, i_head, o_key, is_inside, KEYS: tl.constexpr, HAS_BIAS: tl.constexpr, IS_BY_ROW: tl.constexpr
):
    """Logarithms, summed up over the piece: float64 [TOKENS], or [TOKENS, N]."""
    dt = dt.to(tl.float32)
    if HAS_BIAS:
        if IS_BY_ROW:
            dt += tl.load(bias_ptr + i_head * KEYS + o_key, mask=o_key < KEYS, other=0.0).to(tl.float32)[None, :]
        else:
            dt += tl.load(bias_ptr + i_head).to(tl.float32)
    return tl.cumsum(tl.where(is_inside, softplus(dt), 0.0).to(tl.float64) * a.to(tl.float64), 0)


@triton.jit
def _load_keys(k_ptr, stride_k, o_token, o_key, num_tokens, KEYS: tl.constexpr):
    """Rows of a piece, scaled to length one."""
    is_inside = (o_token < num_tokens)[:, None] & (o_key < KEYS)[None, :]
    rows = tl.load(k_ptr + o_token[:, None] * stride_k + o_key[None, :], mask=is_inside, other=0.0)
    return _unit_rows(rows.to(tl.float32))


@triton.jit
def _store_products_by_row(
    x_ptr,
    k_ptr,
    decays_ptr,
    to_ptr,
    stride_x,
    stride_k,
    num_tokens,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Each row's product with the keys up to its own, decayed between: [TOKENS, TOKENS], above the diagonal anything.

    x_ptr, k_ptr: the piece's first rows of this head, as projected. decays_ptr: [TOKENS, N].
    """
    o_token, o_key, o_row = tl.arange(0, TOKENS), tl.arange(0, KEYS_PADDED), tl.arange(0, BLOCK)
    is_key = o_key < KEYS
    k = _load_keys(k_ptr, stride_k, o_token, o_key, num_tokens, KEYS)
    decay = tl.load(decays_ptr + o_token[:, None] * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
    for first in range(0, TOKENS, BLOCK):
        rows = first + o_row
        is_inside = (rows < num_tokens)[:, None] & is_key[None, :]
        x = tl.load(x_ptr + rows[:, None] * stride_x + o_key[None, :], mask=is_inside, other=0.0).to(tl.float32)
        x = _unit_rows(x)
        x_decay = tl.load(decays_ptr + rows[:, None] * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
        middle = tl.load(decays_ptr + first * KEYS + o_key, mask=is_key, other=0.0)
        # Neither exponent is above zero for columns before these rows; others are replaced.
        left = x * tl.exp((x_decay - middle[None, :]).to(tl.float32))
        right = k * tl.exp(tl.minimum((middle[None, :] - decay).to(tl.float32), 0.0))
        products = tl.dot(left, tl.trans(right), input_precision=PRECISION)
        for column in range(first, first + BLOCK):
            is_here = is_key & (column < num_tokens)
            other = tl.load(k_ptr + column * stride_k + o_key, mask=is_here, other=0.0).to(tl.float32)
            other *= tl.rsqrt(tl.sum(other * other, 0) + KEY_EPS)
            between = x_decay - tl.load(decays_ptr + column * KEYS + o_key, mask=is_key, other=0.0)[None, :]
            product = tl.sum(x * other[None, :] * tl.exp(tl.minimum(between.to(tl.float32), 0.0)), 1)
            products = tl.where(o_token[None, :] == column, product[:, None], products)
        tl.store(to_ptr + rows[:, None] * TOKENS + o_token[None, :], products)


@triton.jit
def _store_products_in_parts(
    x_ptr,
    k_ptr,
    decays_ptr,
    to_ptr,
    stride_x,
    stride_k,
    num_tokens,
    KEYS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """As _store_products_by_row with one decay for the whole head, [TOKENS].

    In parts of a key, scaled to length one at the end: whole rows and keys don't fit the registers.
    """
    o_token = tl.arange(0, TOKENS)
    products = tl.zeros([TOKENS, TOKENS], tl.float32)
    x_squares, k_squares = tl.zeros([TOKENS], tl.float32), tl.zeros([TOKENS], tl.float32)
    for start in range(0, KEYS, KEY_COLUMNS):
        o_part = start + tl.arange(0, KEY_COLUMNS)
        is_part = (o_token < num_tokens)[:, None] & (o_part < KEYS)[None, :]
        x = tl.load(x_ptr + o_token[:, None] * stride_x + o_part[None, :], mask=is_part, other=0.0).to(tl.float32)
        k = tl.load(k_ptr + o_token[:, None] * stride_k + o_part[None, :], mask=is_part, other=0.0).to(tl.float32)
        x_squares += tl.sum(x * x, 1)
        k_squares += tl.sum(k * k, 1)
        products = tl.dot(x, tl.trans(k), products, input_precision=PRECISION)
    products *= tl.rsqrt(x_squares + KEY_EPS)[:, None] * tl.rsqrt(k_squares + KEY_EPS)[None, :]
    decay = tl.load(decays_ptr + o_token)
    between = (decay[:, None] - decay[None, :]).to(tl.float32)
    tl.store(to_ptr + o_token[:, None] * TOKENS + o_token[None, :], products * tl.exp(tl.minimum(between, 0.0)))


@triton.jit
def _store_products(
    x_ptr,
    k_ptr,
    decays_ptr,
    to_ptr,
    stride_x,
    stride_k,
    num_tokens,
    SIZES: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Either of the two above. SIZES: keys, tokens, keys padded, columns of keys at a time."""
    if IS_BY_ROW:
        _store_products_by_row(
            x_ptr, k_ptr, decays_ptr, to_ptr, stride_x, stride_k, num_tokens, SIZES[0], SIZES[1], SIZES[2], PRECISION
        )
    else:
        _store_products_in_parts(
            x_ptr, k_ptr, decays_ptr, to_ptr, stride_x, stride_k, num_tokens, SIZES[0], SIZES[1], SIZES[3], PRECISION
        )


@triton.jit
def delta_prepare_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    dt_ptr,
    b_ptr,
    a_ptr,
    dt_bias_ptr,
    bounds_ptr,
    matrices_ptr,
    inverses_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    beta_scale,
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
    HEADS_IN_GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    KEY_COLUMNS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """keys [pieces, H, TOKENS, N], values [pieces, H, TOKENS, D]: both times the inverse; decays, summed up.

    matrices, inverses: [pieces, H, TOKENS, TOKENS], inverses with zeros in them; at the end matrices hold what each
    query meets of the keys up to its own.
    """
    i_piece, i_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds_ptr + 2 * i_piece).to(tl.int64)
    num_tokens = tl.load(bounds_ptr + 2 * i_piece + 1)
    o_token, o_key = tl.arange(0, TOKENS), tl.arange(0, KEYS_PADDED)
    is_token, is_key = o_token < num_tokens, o_key < KEYS
    is_token_key = is_token[:, None] & is_key[None, :]
    o_piece = i_piece.to(tl.int64) * tl.num_programs(1) + i_head
    i_group = i_head // HEADS_IN_GROUP
    a = tl.load(a_ptr + i_head)
    beta = tl.load(b_ptr + (first + o_token) * stride_b_T + i_head * stride_b_H, mask=is_token, other=0.0)
    beta = tl.where(is_token, beta_scale * tl.sigmoid(beta.to(tl.float32)), 0.0)
    q_ptr += first * stride_q_T + i_group * stride_q_G
    k_ptr += first * stride_k_T + i_group * stride_k_G
    dt_ptr += first * stride_dt_T + i_head * stride_dt_H
    o_square = o_token[:, None] * TOKENS + o_token[None, :]
    matrices_ptr += o_piece * TOKENS * TOKENS
    inverses_ptr += o_piece * TOKENS * TOKENS
    is_earlier = o_token[None, :] < o_token[:, None]
    decays_ptr += o_piece * TOKENS * (KEYS if IS_BY_ROW else 1)
    if IS_BY_ROW:
        dt = tl.load(dt_ptr + o_token[:, None] * stride_dt_T + o_key[None, :], mask=is_token_key, other=0.0)
        decay = _decays(dt, dt_bias_ptr, a, i_head, o_key, is_token_key, KEYS, HAS_BIAS, True)
        tl.store(decays_ptr + o_token[:, None] * KEYS + o_key[None, :], decay, mask=is_key[None, :])
    else:
        dt = tl.load(dt_ptr + o_token * stride_dt_T, mask=is_token, other=0.0)
        decay = _decays(dt, dt_bias_ptr, a, i_head, o_key, is_token, KEYS, HAS_BIAS, False)
        tl.store(decays_ptr + o_token, decay)
    tl.debug_barrier()
    sizes: tl.constexpr = (KEYS, TOKENS, KEYS_PADDED, KEY_COLUMNS)
    _store_products(
        k_ptr, k_ptr, decays_ptr, matrices_ptr, stride_k_T, stride_k_T, num_tokens, sizes, IS_BY_ROW, PRECISION
    )
    tl.debug_barrier()
    met = tl.where(is_earlier, tl.load(matrices_ptr + o_square), 0.0) * beta[:, None]
    tl.debug_barrier()
    tl.store(matrices_ptr + o_square, met)
    tl.debug_barrier()
    _invert(matrices_ptr, inverses_ptr, TOKENS)
    inverse = tl.load(inverses_ptr + o_square)
    # Loaded again: what is held over the inversion is what registers are spilled for.
    k = _load_keys(k_ptr, stride_k_T, o_token, o_key, num_tokens, KEYS) * beta[:, None]
    if IS_BY_ROW:
        decay = tl.load(decays_ptr + o_token[:, None] * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
        k *= tl.exp(decay.to(tl.float32))
    else:
        k *= tl.exp(tl.load(decays_ptr + o_token).to(tl.float32))[:, None]
    o_out = (o_piece * TOKENS + o_token)[:, None]
    tl.store(
        keys_ptr + o_out * KEYS + o_key[None, :],
        tl.dot(inverse, k, input_precision=PRECISION),
        mask=is_key[None, :],
    )
    for column in range(0, VALUES, COLUMNS):
        o_value = column + tl.arange(0, COLUMNS)
        is_value = o_value < VALUES
        o_v = (first + o_token)[:, None] * stride_v_T + i_head * stride_v_H + o_value[None, :]
        v = tl.load(v_ptr + o_v, mask=is_token[:, None] & is_value[None, :], other=0.0).to(tl.float32)
        v = tl.dot(inverse, v * beta[:, None], input_precision=PRECISION)
        tl.store(values_ptr + o_out * VALUES + o_value[None, :], v, mask=is_value[None, :])
    _store_products(
        q_ptr, k_ptr, decays_ptr, matrices_ptr, stride_q_T, stride_k_T, num_tokens, sizes, IS_BY_ROW, PRECISION
    )


@triton.jit
def delta_pass_kernel(
    k_ptr,
    bounds_ptr,
    keys_ptr,
    values_ptr,
    decays_ptr,
    before_ptr,
    row_pieces_ptr,
    piece_slots_ptr,
    states_ptr,
    slots_ptr,
    has_history_ptr,
    stride_k_T,
    stride_k_G,
    stride_state,
    HEADS_IN_GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk a request's pieces: values become what is written; captures and the last state are kept.

    before [pieces, H, N, D]: the state before each piece.
    """
    i_row, i_head = tl.program_id(0), tl.program_id(1)
    first_piece = tl.load(row_pieces_ptr + i_row).to(tl.int64)
    end_piece = tl.load(row_pieces_ptr + i_row + 1).to(tl.int64)
    if first_piece == end_piece:
        return
    o_token, o_key = tl.arange(0, TOKENS), tl.arange(0, KEYS_PADDED)
    o_value = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_key, is_value = o_key < KEYS, o_value < VALUES
    is_inside = is_key[:, None] & is_value[None, :]
    o_inside = o_key[:, None] * VALUES + o_value[None, :]
    state_ptr = states_ptr + i_head * KEYS * VALUES + o_inside
    slot = tl.load(slots_ptr + i_row)
    has_history = tl.load(has_history_ptr + i_row) != 0
    state = tl.load(state_ptr + slot * stride_state, mask=is_inside & has_history, other=0.0)
    for piece in range(first_piece, end_piece):
        o_piece = piece * tl.num_programs(1) + i_head
        first = tl.load(bounds_ptr + 2 * piece).to(tl.int64)
        is_token = o_token < tl.load(bounds_ptr + 2 * piece + 1)
        tl.store(before_ptr + o_piece * KEYS * VALUES + o_inside, state, mask=is_inside)
        o_rows = (o_piece * TOKENS + o_token)[:, None]
        keys = tl.load(keys_ptr + o_rows * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
        values = tl.load(values_ptr + o_rows * VALUES + o_value[None, :], mask=is_value[None, :], other=0.0)
        written = values - tl.dot(keys, state, input_precision=PRECISION)
        tl.debug_barrier()  # values may lie with other threads than what is written: all have read before one writes
        tl.store(values_ptr + o_rows * VALUES + o_value[None, :], written, mask=is_value[None, :])
        o_k = (first + o_token)[:, None] * stride_k_T + i_head // HEADS_IN_GROUP * stride_k_G + o_key[None, :]
        k = tl.load(k_ptr + o_k, mask=is_token[:, None] & is_key[None, :], other=0.0).to(tl.float32)
        if IS_BY_ROW:
            decay = tl.load(decays_ptr + o_rows * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
            end_decay = tl.load(decays_ptr + ((o_piece + 1) * TOKENS - 1) * KEYS + o_key, mask=is_key, other=0.0)
            k = _unit_rows(k) * tl.exp((end_decay[None, :] - decay).to(tl.float32))
            state = state * tl.exp(end_decay.to(tl.float32))[:, None]
        else:
            decay = tl.load(decays_ptr + o_piece * TOKENS + o_token)
            end_decay = tl.load(decays_ptr + o_piece * TOKENS + TOKENS - 1)
            k = _unit_rows(k) * tl.exp((end_decay - decay).to(tl.float32))[:, None]
            state = state * tl.exp(end_decay.to(tl.float32))
        state += tl.dot(tl.trans(k), written, input_precision=PRECISION)
        target = tl.load(piece_slots_ptr + piece)
        tl.store(state_ptr + target * stride_state, state, mask=is_inside & (target >= 0))
    tl.store(state_ptr + slot * stride_state, state, mask=is_inside)


@triton.jit
def delta_output_kernel(
    q_ptr,
    bounds_ptr,
    before_ptr,
    written_ptr,
    decays_ptr,
    weights_ptr,
    out_ptr,
    query_scale,
    stride_q_T,
    stride_q_G,
    HEADS_IN_GROUP: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    IS_BY_ROW: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS_PADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What a query reads of the state before the piece, and of what the piece's tokens up to its own wrote."""
    i_piece, i_head = tl.program_id(0), tl.program_id(1)
    first = tl.load(bounds_ptr + 2 * i_piece).to(tl.int64)
    num_tokens = tl.load(bounds_ptr + 2 * i_piece + 1)
    o_token, o_key = tl.arange(0, TOKENS), tl.arange(0, KEYS_PADDED)
    o_value = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    is_token, is_key, is_value = o_token < num_tokens, o_key < KEYS, o_value < VALUES
    o_piece = i_piece.to(tl.int64) * tl.num_programs(1) + i_head
    o_q = (first + o_token)[:, None] * stride_q_T + i_head // HEADS_IN_GROUP * stride_q_G + o_key[None, :]
    q = tl.load(q_ptr + o_q, mask=is_token[:, None] & is_key[None, :], other=0.0).to(tl.float32)
    q = _unit_rows(q)
    o_rows = (o_piece * TOKENS + o_token)[:, None]
    if IS_BY_ROW:
        decay = tl.load(decays_ptr + o_rows * KEYS + o_key[None, :], mask=is_key[None, :], other=0.0)
        q *= tl.exp(decay.to(tl.float32))
    else:
        q *= tl.exp(tl.load(decays_ptr + o_piece * TOKENS + o_token).to(tl.float32))[:, None]
    o_before = (o_piece * KEYS + o_key)[:, None] * VALUES + o_value[None, :]
    before = tl.load(before_ptr + o_before, mask=is_key[:, None] & is_value[None, :], other=0.0)
    out = tl.dot(q, before, input_precision=PRECISION)
    weights = tl.load(weights_ptr + o_rows * TOKENS + o_token[None, :])
    weights = tl.where(o_token[None, :] <= o_token[:, None], weights, 0.0)
    written = tl.load(written_ptr + o_rows * VALUES + o_value[None, :], mask=is_value[None, :], other=0.0)
    out = tl.dot(weights, written, out, input_precision=PRECISION) * query_scale
    o_out = ((first + o_token)[:, None] * tl.num_programs(1) + i_head) * VALUES + o_value[None, :]
    tl.store(out_ptr + o_out, out.to(out_ptr.dtype.element_ty), mask=is_token[:, None] & is_value[None, :])
