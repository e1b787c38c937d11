"""Drawing tokens where the logits lie. On a CPU the runner's own sampler draws; this is for other devices."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.checks import check_dtype, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = ["NUM_COLUMNS", "draw_in_place"]

NUM_COLUMNS = 5
"""What a draw depends on, columns of numbers_RC: 1 / temperature, or 0 where the highest logit is wanted; what is added
to the highest logit for the lowest one kept (temperature * log(min_p), or minus infinity); top_k, 0 for all; top_p; and
the draw from [0, 1)."""


def draw_in_place(logits_RV: Tensor, numbers_RC: Tensor, *, token_ids_R: Tensor) -> None:
    """Put a drawn token in the place of each row's likeliest one, where one is to be drawn.

    Of the tokens that min_p, then top_k, then top_p keep, tokens of equal logits alike, in order of their ids the one
    at which the running sum of weights exp(logit / temperature) first exceeds the draw's share of them all. A row's
    token doesn't depend on other rows.

    logits_RV: float32. numbers_RC: float64 [R, NUM_COLUMNS]. token_ids_R: int64, the places of the highest logits; one
    below 0 stays.
    """
    check_shape("logits_RV", logits_RV, None, None)
    check_dtype("logits_RV", logits_RV, torch.float32)
    check_shape("numbers_RC", numbers_RC, len(logits_RV), NUM_COLUMNS)
    check_dtype("numbers_RC", numbers_RC, torch.float64)
    check_shape("token_ids_R", token_ids_R, len(logits_RV))
    check_dtype("token_ids_R", token_ids_R, torch.int64)
    implementation(__name__, logits_RV.device.type).draw_in_place(logits_RV, numbers_RC, token_ids_R)
