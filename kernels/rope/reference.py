"""Rotary embedding in plain torch, half-rotation layout: element i turns with element i + D/2."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Turn the first cos_TD.shape[1] elements of every head; the rest pass through."""
    size = cos_TD.shape[1]
    turned, rest = x_THD[..., :size].float(), x_THD[..., size:]
    low, high = turned.chunk(2, -1)
    turned = turned * cos_TD[:, None] + torch.cat([-high, low], -1) * sin_TD[:, None]
    return torch.cat([turned.to(x_THD.dtype), rest], -1)


def apply_rope(q_THD: Tensor, k_TKD: Tensor, *, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """Turn queries and keys."""
    return rotate(q_THD, cos_TD, sin_TD), rotate(k_TKD, cos_TD, sin_TD)


def rope_table(positions_T: Tensor, frequencies_F: Tensor, *, magnitude: float) -> tuple[Tensor, Tensor]:
    """Take both of each angle twice: for element i, and for element i + F, which turns with it."""
    angles_TD = (positions_T.float()[:, None] * frequencies_F).repeat(1, 2)
    return angles_TD.cos() * magnitude, angles_TD.sin() * magnitude
