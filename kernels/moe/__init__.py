"""A mixture of experts: each token goes through a few MLPs that a router has chosen for it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels import activation as plain
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_same, check_shape
from hybrid_engine.kernels.dispatch import implementation
from hybrid_engine.kernels.linear import check_quantization

__all__ = ["Activation", "PackedExperts", "moe"]

SWIGLU_CLAMPED, RELU_SQUARED = "swiglu_clamped", "relu_squared"
KINDS = (*plain.KINDS, SWIGLU_CLAMPED, RELU_SQUARED)


@dataclass(frozen=True)
class Activation:
    """What stands between an expert's two products.

    gelu, gelu_tanh, silu: act(gate) * up. swiglu_clamped: with the gate at most `limit` and up within it on both sides,
    gate * sigmoid(alpha * gate) * (up + 1) (GPT-OSS). relu_squared: relu(up)^2, there is no gate (Nemotron-H).
    """

    kind: str
    alpha: float = 1.0
    limit: float = math.inf

    @property
    def is_gated(self) -> bool:
        """Whether the first product gives gates beside what they gate."""
        return self.kind != RELU_SQUARED


class PackedExperts:
    """A stack of matrices [X, N, K], one an expert, in the form that its device multiplies fastest."""

    def __init__(self, form: Any, *, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
        """Use pack()."""
        self.form = form
        self.num_experts, self.num_outputs, self.num_inputs = shape
        self.dtype = dtype

    @classmethod
    def pack(cls, matrices_XNK: Tensor, quantization: str | None = None, *, is_exact: bool = False) -> PackedExperts:
        """Pack a stack, float32 or bfloat16 (other dtypes raise ShapeError); it may be kept instead of copied.

        quantization: one of kernels.linear.QUANTIZATIONS; None keeps every bit. Raises ConfigError for any other.
        is_exact: a token gives the same bits whatever tokens are beside it, which on a GPU costs time.
        """
        check_shape("matrices_XNK", matrices_XNK, None, None, None)
        check_dtype("matrices_XNK", matrices_XNK, *FLOATS)
        num_experts, num_outputs, num_inputs = matrices_XNK.shape
        device_type = matrices_XNK.device.type
        check_quantization(quantization, device_type=device_type)
        form = implementation(__name__, device_type).pack(matrices_XNK.detach(), quantization, is_exact)
        return cls(form, shape=(num_experts, num_outputs, num_inputs), dtype=matrices_XNK.dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        if isinstance(self.form, Tensor):
            return self.form.numel() * self.form.element_size()
        return sum(each.num_bytes for each in self.form) if isinstance(self.form, tuple) else self.form.num_bytes


def moe(
    x_TE: Tensor,
    weights_TC: Tensor,
    experts_TC: Tensor,
    *,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation,
    gate_up_bias_XN: Tensor | None = None,
    down_bias_XE: Tensor | None = None,
    weighs_inputs: bool = False,
) -> Tensor:
    """The sum over a token's C experts of weight * down(activation(gate_up(x))): [T, E], x's dtype.

    x_TE: float32 or bfloat16, as the matrices. weights_TC: float32. experts_TC: int64, each within [0, X): on a GPU
    nobody looks. gate_up: N = 2I, the gates' rows before the ups', or I where there are no gates. Biases: float32.
    weighs_inputs: the weights multiply what goes into the experts, not what comes out (Llama 4).
    A token's outputs are summed in the order of its experts, whatever else is in the batch.
    Raises ShapeError when shapes or dtypes don't fit or the activation is unknown.
    """
    if activation.kind not in KINDS:
        raise ShapeError(f"activation is {activation.kind!r}, must be one of {', '.join(KINDS)}")
    num_tokens, inner = len(x_TE), down.num_inputs
    check_dtype("x_TE", x_TE, gate_up.dtype)
    check_dtype("down", x_TE, down.dtype)
    check_shape("x_TE", x_TE, None, gate_up.num_inputs)
    check_shape("experts_TC", experts_TC, num_tokens, None)
    check_dtype("experts_TC", experts_TC, torch.int64)
    check_shape("weights_TC", weights_TC, *experts_TC.shape)
    check_dtype("weights_TC", weights_TC, torch.float32)
    wanted = (gate_up.num_experts, gate_up.num_inputs, (1 + activation.is_gated) * inner)
    if (down.num_experts, down.num_outputs, gate_up.num_outputs) != wanted:
        raise ShapeError(
            f"gate_up is [{gate_up.num_experts}, {gate_up.num_outputs}, {gate_up.num_inputs}] and down "
            f"[{down.num_experts}, {down.num_outputs}, {inner}]: with {activation.kind} gate_up must be "
            f"[{down.num_experts}, {wanted[2]}, {down.num_outputs}]"
        )
    for name, bias, packed in (("gate_up_bias_XN", gate_up_bias_XN, gate_up), ("down_bias_XE", down_bias_XE, down)):
        if bias is not None:
            check_shape(name, bias, packed.num_experts, packed.num_outputs)
            check_same(name, bias, "weights_TC", weights_TC)
    return implementation(__name__, x_TE.device.type).moe(
        x_TE,
        weights_TC,
        experts_TC,
        gate_up=gate_up.form,
        down=down.form,
        activation=activation,
        gate_up_bias_XN=gate_up_bias_XN,
        down_bias_XE=down_bias_XE,
        weighs_inputs=weighs_inputs,
    )
