"""Log-probabilities of the model's own distribution: before penalties, temperature and filters."""

from __future__ import annotations

import math

import numpy as np

from hybrid_engine.runner.filters import exp_weights, highest
from hybrid_engine.step_plan import TokenLogprobs


def token_logprobs(logits_V: np.ndarray, token_id: int, *, num_top: int, scratch_V: np.ndarray) -> TokenLogprobs:
    """Return the log-probability and rank of a token beside those of the num_top likeliest.

    logits_V: float32, as the model gave them. scratch_V: float32, overwritten. Equal logits share the best rank
    among them; the likeliest stand in the order of their ids then.
    """
    peak = float(logits_V.max())
    log_total = peak + math.log(exp_weights(logits_V, 1.0, peak=peak, out_V=scratch_V).sum(dtype=np.float64))
    top_ids = highest(logits_V, min(num_top, len(logits_V))) if num_top else np.empty(0, np.int64)
    top_logprobs = logits_V[top_ids].astype(np.float64) - log_total
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits_V[token_id]) - log_total,
        rank=1 + int(np.count_nonzero(logits_V > logits_V[token_id])),
        top=tuple(zip(top_ids.tolist(), top_logprobs.tolist(), strict=True)),
    )
