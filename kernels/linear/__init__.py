"""Linear layers on weights that are packed once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.checks import check_shape
from hybrid_engine.kernels.linear import cpu
from hybrid_engine.kernels.linear.packed import QUANTIZATIONS, PackedLinear, check_quantization
from hybrid_engine.kernels.linear.screen import Screen, can_screen

__all__ = ["QUANTIZATIONS", "PackedLinear", "Screen", "can_screen", "check_quantization", "linear", "linear_gated"]


def linear(
    x_TK: Tensor, packed: PackedLinear, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x times the weight's transpose, plus the bias: [T, N].

    x_TK: the packed weight's dtype. bias_N: any float dtype. out_dtype: float32 or bfloat16, x's when None: the sum
    is in float32 whatever the dtypes, so float32 out of bfloat16 weights loses nothing (logits).
    Raises ShapeError when shapes or dtypes don't fit.
    """
    _check(x_TK, packed, bias_N)
    return packed.form.multiply(x_TK, bias_N, out_dtype=out_dtype or x_TK.dtype)


def linear_gated(x_TK: Tensor, packed: PackedLinear, bias_N: Tensor | None = None, *, kind: str) -> Tensor:
    """act(gate) * up of a weight whose outputs are gate's, then up's: [T, N / 2], as linear() and then act_mul().

    On a CPU in one pass where it can be: gate and up, the largest tensors of a step, are then never written to memory.
    kind: as act_mul()'s. Raises ShapeError when shapes, dtypes or the kind don't fit.
    """
    form = packed.form
    if isinstance(form, cpu.TiledForm) and form.can_gate(kind):
        _check(x_TK, packed, bias_N)
        return form.multiply_gated(x_TK, bias_N, kind=kind)
    return act_mul(linear(x_TK, packed, bias_N), kind=kind)


def _check(x_TK: Tensor, packed: PackedLinear, bias_N: Tensor | None) -> None:
    check_shape("x_TK", x_TK, None, packed.num_inputs)
    if x_TK.dtype != packed.dtype or x_TK.device != packed.device:
        raise ShapeError(
            f"x_TK is {x_TK.dtype} on {x_TK.device}, must be like what the weight was packed from: {packed.dtype} on "
            f"{packed.device}"
        )
    if bias_N is not None:
        check_shape("bias_N", bias_N, packed.num_outputs)
