"""Activations, alone and as gates of MLPs."""

from __future__ import annotations

from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = ["act", "act_mul"]

KINDS = ("gelu", "gelu_tanh", "silu")
PLAIN_KINDS = ("gelu_tanh", "sigmoid", "silu")


def act(x: Tensor, *, kind: str) -> Tensor:
    """act(x), element by element, computed in float32, in x's dtype: a new tensor.

    What an element becomes depends on it alone: torch's own functions round otherwise where a tensor ends.
    x: float32 or bfloat16, any shape. kind: one of PLAIN_KINDS. Raises ShapeError when dtype or kind doesn't fit.
    """
    check_dtype("x", x, *FLOATS)
    if kind not in PLAIN_KINDS:
        raise ShapeError(f"kind is {kind!r}, must be one of {', '.join(PLAIN_KINDS)}")
    return implementation(__name__, x.device.type).act(x, kind=kind)


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
