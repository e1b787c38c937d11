"""Rotary position embedding, half-rotation layout (element i turns with element i + D/2)."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_same, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = ["apply_rope", "rope_table"]


def apply_rope(q_THD: Tensor, k_TKD: Tensor, *, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys by their tokens' angles: new tensors (q_THD, k_TKD).

    q_THD, k_TKD: float32 or bfloat16. cos_TD, sin_TD: float32, the tables' rows of the tokens, both halves filled;
    a last dimension below D turns only the heads' first elements. Raises ShapeError when shapes or dtypes don't fit.
    """
    num_tokens, _, head_size = q_THD.shape
    check_dtype("q_THD", q_THD, *FLOATS)
    check_same("k_TKD", k_TKD, "q_THD", q_THD)
    check_shape("k_TKD", k_TKD, num_tokens, None, head_size)
    check_shape("cos_TD", cos_TD, num_tokens, None)
    check_shape("sin_TD", sin_TD, *cos_TD.shape)
    check_dtype("cos_TD", cos_TD, torch.float32)
    check_same("sin_TD", sin_TD, "cos_TD", cos_TD)
    if cos_TD.shape[1] > head_size or cos_TD.shape[1] % 2:
        raise ShapeError(f"cos_TD has {cos_TD.shape[1]} columns, must be even and at most the head size {head_size}")
    return implementation(__name__, q_THD.device.type).apply_rope(q_THD, k_TKD, cos_TD=cos_TD, sin_TD=sin_TD)


def rope_table(positions_T: Tensor, frequencies_F: Tensor, *, magnitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the positions' angles, times the magnitude, both halves filled: float32 [T, 2 F] each.

    positions_T: int64. frequencies_F: float32, radians a position. Raises ShapeError when shapes or dtypes don't fit.
    """
    check_shape("positions_T", positions_T, None)
    check_dtype("positions_T", positions_T, torch.int64)
    check_shape("frequencies_F", frequencies_F, None)
    check_dtype("frequencies_F", frequencies_F, torch.float32)
    run = implementation(__name__, positions_T.device.type).rope_table
    return run(positions_T, frequencies_F, magnitude=magnitude)
