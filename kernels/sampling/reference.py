"""Draws in plain torch: everything sorted, in float64, one row after the other."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_in_place(logits_RV: Tensor, numbers_RC: Tensor, token_ids_R: Tensor) -> None:
    """Draw."""
    for row, (inverse, drop, top_k, top_p, draw) in enumerate(numbers_RC.tolist()):
        peak_id = int(token_ids_R[row])
        if inverse == 0 or peak_id < 0:
            continue
        logits_V = logits_RV[row]
        peak = logits_V[peak_id]
        is_kept_V = logits_V >= peak + torch.tensor(drop, dtype=torch.float32)
        ordered_V = logits_V.sort(descending=True).values
        if 0 < top_k < len(ordered_V):
            is_kept_V &= logits_V >= ordered_V[int(top_k) - 1]
        weights_V = torch.where(is_kept_V, ((logits_V - peak).double() * inverse).exp(), 0.0)
        if top_p < 1:
            sorted_V, order_V = weights_V.sort(descending=True)
            end = int((sorted_V.cumsum(0) < top_p * weights_V.sum()).sum())
            weights_V = torch.where(logits_V >= logits_V[order_V[end]], weights_V, 0.0)
        sums_V = weights_V.cumsum(0)
        token_ids_R[row] = int((sums_V <= draw * sums_V[-1]).sum())
