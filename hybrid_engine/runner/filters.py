"""Which tokens stay, each filter told as one number: the lowest logit that it keeps.

All work on one request's logits_V, float32 numpy, so that no result can depend on what else is in the batch. Tokens
of equal logits stay or go together. A whole vocabulary is never sorted where a few of its highest logits will do: the
k-th highest of the maxima of some blocks is at most the k-th highest logit, and only few logits reach it.
"""

from __future__ import annotations

import math

import numpy as np

from hybrid_engine.sampling_params import SamplingParams

_MAX_BLOCK_SIZE = 512
_BLOCKS_PER_WANTED = 4
"""Blocks made for each token wanted: with fewer, more of the wanted ones share a block and the bound gets loose."""
_MIN_BLOCK_SIZE = 16
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_NUCLEUS_SIZES = (64, 1024, 16384)
"""How many of the likeliest tokens are looked at before all are sorted."""


def kth_highest(logits_V: np.ndarray, k: int) -> float:
    """Return the k-th highest logit, equal ones counted each; 1 <= k <= V."""
    candidates = logits_V[_candidates(logits_V, k)]
    return float(np.partition(candidates, len(candidates) - k)[len(candidates) - k])


def highest(logits_V: np.ndarray, k: int) -> np.ndarray:
    """Return the ids of the k highest logits, the highest first, equal ones by id."""
    token_ids = _candidates(logits_V, k)
    candidates = logits_V[token_ids]
    if len(candidates) > k:
        kept = candidates >= np.partition(candidates, len(candidates) - k)[len(candidates) - k]
        token_ids, candidates = token_ids[kept], candidates[kept]
    return token_ids[np.argsort(-candidates, kind="stable")[:k]]


def _candidates(logits_V: np.ndarray, k: int) -> np.ndarray:
    """Return the ids, ascending, of not many more than k logits, the k highest among them."""
    block_size = min(_MAX_BLOCK_SIZE, len(logits_V) // (_BLOCKS_PER_WANTED * k))
    if block_size < _MIN_BLOCK_SIZE:
        return np.arange(len(logits_V))
    maxima = np.maximum.reduceat(logits_V, np.arange(0, len(logits_V), block_size))
    bound = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    return np.flatnonzero(logits_V >= bound)


def lowest_kept(logits_V: np.ndarray, sampling: SamplingParams, *, peak: float, scratch_V: np.ndarray) -> float:
    """Return the lowest logit that min_p, then top_k, then top_p keep; -inf when nothing is filtered.

    peak: the highest logit. scratch_V: float32, overwritten.
    """
    lowest = -math.inf
    if sampling.min_p > 0:
        lowest = peak + sampling.temperature * math.log(sampling.min_p)
    if 0 < sampling.top_k < len(logits_V):
        lowest = max(lowest, kth_highest(logits_V, sampling.top_k))
    if sampling.top_p == 1:
        return lowest
    if lowest == -math.inf:
        return _lowest_of_nucleus(logits_V, sampling, peak=peak, scratch_V=scratch_V)
    kept, weights = _best_first(logits_V, lowest, temperature=sampling.temperature, peak=peak)
    return float(kept[_nucleus_end(weights, sampling.top_p * weights.sum())])


def exp_weights(logits_V: np.ndarray, temperature: float, *, peak: float, out_V: np.ndarray) -> np.ndarray:
    """Write exp((logit - peak) / temperature) into out_V and return it."""
    np.subtract(logits_V, np.float32(peak), out=out_V)
    if temperature != 1:
        # The largest float32 stands for what a tiny temperature makes of a difference: exp gives 0 for both.
        np.multiply(out_V, np.float32(min(1 / temperature, _MAX_FLOAT32)), out=out_V)
    return np.exp(out_V, out=out_V)


def _lowest_of_nucleus(logits_V: np.ndarray, sampling: SamplingParams, *, peak: float, scratch_V: np.ndarray) -> float:
    """Return the lowest logit of the smallest set of likeliest tokens that has top_p of the whole probability."""
    total = exp_weights(logits_V, sampling.temperature, peak=peak, out_V=scratch_V).sum(dtype=np.float64)
    wanted = sampling.top_p * total
    for size in (*_NUCLEUS_SIZES, len(logits_V)):
        lowest = kth_highest(logits_V, min(size, len(logits_V)))
        kept, weights = _best_first(logits_V, lowest, temperature=sampling.temperature, peak=peak)
        if weights.sum() >= wanted:
            break
    return float(kept[_nucleus_end(weights, wanted)])


def _best_first(
    logits_V: np.ndarray, lowest: float, *, temperature: float, peak: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return the logits from lowest up, the highest first, and their weights in float64."""
    kept = np.sort(logits_V[logits_V >= np.float32(lowest)])[::-1]
    return kept, np.exp((kept.astype(np.float64) - peak) / temperature)


def _nucleus_end(weights: np.ndarray, wanted: float) -> int:
    """Return the index of the weight with which the running sum reaches what is wanted, the last one if none does."""
    return min(int(np.searchsorted(np.cumsum(weights), wanted, side="left")), len(weights) - 1)
