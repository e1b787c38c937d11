"""Gated activations in plain torch, computed in float32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """act(gate) * up, the two halves of the input's columns."""
    gate_TI, up_TI = gate_up_TC.float().chunk(2, -1)
    act_TI = F.gelu(gate_TI, approximate="tanh") if kind == "gelu_tanh" else F.silu(gate_TI)
    return (act_TI * up_TI).to(gate_up_TC.dtype)
