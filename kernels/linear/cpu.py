"""Linear layers on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def pack(weight_NK: Tensor) -> Tensor | None:
    """The weight in tiles, or None where the plain layout is the one to keep."""
    return None


def rows(tiles: Tensor, ids_T: Tensor, num_inputs: int) -> Tensor:
    """Rows of a tiled weight."""
    raise NotImplementedError


def linear_tiled(
    x_TK: Tensor, tiles: Tensor, num_outputs: int, bias_N: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """x times the transpose of a tiled weight."""
    raise NotImplementedError


def linear_plain(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """torch's own linear."""
    bias_N = bias_N if bias_N is None else bias_N.to(x_TK.dtype)
    return F.linear(x_TK, weight_NK, bias_N).to(out_dtype)
