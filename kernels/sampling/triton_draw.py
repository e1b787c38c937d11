"""A draw from a row of logits: thresholds by bisection over the bits of a logit, then the place of the draw.

Nothing is sorted: whether a token stays is told by one number, the lowest logit that does, and each step of a bisection
passes over the row once. A row of a large vocabulary is 1 MB, which stays in the cache of the GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _ordered(x):
    """A whole number that is larger where x is; of both zeros the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)


@triton.jit
def _weights(row_ptr, first, lowest, peak, inverse, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The weights of a block's tokens, float64; 0 of those whose logit is below the lowest one kept."""
    o_token = first + tl.arange(0, BLOCK)
    logits = tl.load(row_ptr + o_token, mask=o_token < VOCAB, other=float("-inf"))
    is_kept = (_ordered(logits) >= lowest) & (o_token < VOCAB)
    return tl.where(is_kept, tl.exp((logits - peak) * inverse), 0.0).to(tl.float64)


@triton.jit
def _kept(row_ptr, lowest, peak, inverse, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """How many tokens have at least the lowest logit, or what they weigh together."""
    total = tl.zeros([BLOCK], tl.float64)
    for first in range(0, VOCAB, BLOCK):
        if COUNTS:
            o_token = first + tl.arange(0, BLOCK)
            logits = tl.load(row_ptr + o_token, mask=o_token < VOCAB, other=float("-inf"))
            total += ((_ordered(logits) >= lowest) & (o_token < VOCAB)).to(tl.float64)
        else:
            total += _weights(row_ptr, first, lowest, peak, inverse, VOCAB, BLOCK)
    return tl.sum(total, 0)


@triton.jit
def _raised(row_ptr, lowest, peak, inverse, wanted, COUNTS: tl.constexpr, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """The highest threshold from the lowest on which keeps as much as is wanted."""
    low = lowest
    high = _ordered(peak) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        is_enough = _kept(row_ptr, middle, peak, inverse, COUNTS, VOCAB, BLOCK) >= wanted
        low = tl.where(is_enough, middle, low)
        high = tl.where(is_enough, high, middle)
    return low


@triton.jit
def draw_kernel(logits_ptr, numbers_ptr, tokens_ptr, stride_logits, VOCAB: tl.constexpr, BLOCK: tl.constexpr):
    """tokens [R]: the likeliest token of a row, drawn ones on return."""
    i_row = tl.program_id(0).to(tl.int64)
    numbers_ptr += i_row * 5
    inverse = tl.load(numbers_ptr).to(tl.float32)
    likeliest = tl.load(tokens_ptr + i_row)
    if inverse == 0.0 or likeliest < 0:
        return
    row_ptr = logits_ptr + i_row * stride_logits
    peak = tl.load(row_ptr + likeliest)
    lowest = _ordered(peak + tl.load(numbers_ptr + 1).to(tl.float32))
    top_k, top_p, draw = tl.load(numbers_ptr + 2), tl.load(numbers_ptr + 3), tl.load(numbers_ptr + 4)
    if top_k > 0.0 and top_k < VOCAB:
        lowest = _raised(row_ptr, lowest, peak, inverse, top_k, True, VOCAB, BLOCK)
    total = _kept(row_ptr, lowest, peak, inverse, False, VOCAB, BLOCK)
    if top_p < 1.0:
        lowest = _raised(row_ptr, lowest, peak, inverse, top_p * total, False, VOCAB, BLOCK)
        total = _kept(row_ptr, lowest, peak, inverse, False, VOCAB, BLOCK)
    target = draw * total
    # The block in which the running sum first exceeds the target, and the sum before it.
    running = target * 0.0
    before = target * 0.0
    block = -1
    for first in range(0, VOCAB, BLOCK):
        here = tl.sum(_weights(row_ptr, first, lowest, peak, inverse, VOCAB, BLOCK), 0)
        is_it = (block < 0) & (running + here > target)
        before = tl.where(is_it, running, before)
        block = tl.where(is_it, first, block)
        running += here
    if block >= 0:  # else rounding carried the target past the end, and the likeliest token stays
        weights = _weights(row_ptr, block, lowest, peak, inverse, VOCAB, BLOCK)
        place = tl.sum((before + tl.cumsum(weights, 0) <= target).to(tl.int32), 0)
        # Sums taken in another order may differ in the last bit: the last token kept of the block is the limit.
        last = tl.max(tl.where(weights > 0.0, tl.arange(0, BLOCK), 0), 0)
        tl.store(tokens_ptr + i_row, (block + tl.minimum(place, last)).to(tl.int64))
