"""Gated activations of MLPs."""

from __future__ import annotations

from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = ["act_mul"]

KINDS = ("gelu", "gelu_tanh", "silu")


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """act(gate) * up: [T, I], computed in float32.

    gate_up_TC: float32 or bfloat16, C = 2I: gate's columns, then up's. kind: one of KINDS.
    Raises ShapeError when a shape or dtype doesn't fit or the kind is unknown.
    """
    check_shape("gate_up_TC", gate_up_TC, None, None)
    check_dtype("gate_up_TC", gate_up_TC, *FLOATS)
    if gate_up_TC.shape[1] % 2:
        raise ShapeError(f"gate_up_TC has {gate_up_TC.shape[1]} columns, must be even: gate's, then up's")
    if kind not in KINDS:
        raise ShapeError(f"kind is {kind!r}, must be one of {', '.join(KINDS)}")
    return implementation(__name__, gate_up_TC.device.type).act_mul(gate_up_TC, kind=kind)
