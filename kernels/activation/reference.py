"""Activations in plain torch, computed in float32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def act(x: Tensor, *, kind: str) -> Tensor:
    """act(x)."""
    return _act(x.float(), kind).to(x.dtype)


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """act(gate) * up, the two halves of the input's columns."""
    gate_TI, up_TI = gate_up_TC.float().chunk(2, -1)
    return (_act(gate_TI, kind) * up_TI).to(gate_up_TC.dtype)


def _act(x_TI: Tensor, kind: str) -> Tensor:
    if kind == "sigmoid":
        return x_TI.sigmoid()
    if kind == "silu":
        return F.silu(x_TI)
    return F.gelu(x_TI, approximate="tanh" if kind == "gelu_tanh" else "none")
