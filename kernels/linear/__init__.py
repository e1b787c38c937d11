"""Linear layers on weights that are packed once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_same, check_shape
from hybrid_engine.kernels.dispatch import implementation
from hybrid_engine.kernels.linear import cpu

__all__ = ["PackedLinear", "linear"]


class PackedLinear:
    """A weight [N, K] in the layout that its device multiplies fastest. It replaces the plain weight, in memory too.

    An embedding tied to the head is one PackedLinear: linear() gives logits, rows() looks tokens up.
    """

    def __init__(self, data: Tensor, *, shape: tuple[int, int], is_tiled: bool) -> None:
        """Use pack()."""
        self.data = data
        self.num_outputs, self.num_inputs = shape
        self.is_tiled = is_tiled

    @classmethod
    def pack(cls, weight_NK: Tensor) -> PackedLinear:
        """Pack a weight, float32 or bfloat16 (other dtypes raise ShapeError); the argument may be freed afterwards.

        Packing may keep a reference to the weight instead of copying it: don't write to it afterwards.
        """
        check_shape("weight_NK", weight_NK, None, None)
        check_dtype("weight_NK", weight_NK, *FLOATS)
        weight_NK = weight_NK.detach()
        num_outputs, num_inputs = weight_NK.shape
        tiled = cpu.pack(weight_NK) if weight_NK.device.type == "cpu" else None
        data = weight_NK.contiguous() if tiled is None else tiled
        return cls(data, shape=(num_outputs, num_inputs), is_tiled=tiled is not None)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight and of the inputs that it multiplies."""
        return self.data.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.data.element_size()

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight [T, K], in its dtype: an embedding lookup. ids_T: int64; IndexError when out of range."""
        check_shape("ids_T", ids_T, None)
        check_dtype("ids_T", ids_T, torch.int64)
        if self.data.device.type == "cpu":
            cpu.check_ids(ids_T, self.num_outputs)
        if not self.is_tiled:
            return self.data[ids_T]
        return cpu.rows_tiled(self.data, ids_T, num_outputs=self.num_outputs, num_inputs=self.num_inputs)

    def weight_NK(self) -> Tensor:
        """The plain weight, unpacked into a new tensor or the one held."""
        return self.rows(torch.arange(self.num_outputs)) if self.is_tiled else self.data


def linear(
    x_TK: Tensor, packed: PackedLinear, bias_N: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x times the weight's transpose, plus the bias: [T, N].

    x_TK: the weight's dtype. bias_N: any float dtype. out_dtype: float32 or bfloat16, x's when None: the sum
    is in float32 whatever the dtypes, so float32 out of bfloat16 weights loses nothing (logits).
    Raises ShapeError when shapes or dtypes don't fit.
    """
    check_shape("x_TK", x_TK, None, packed.num_inputs)
    check_same("x_TK", x_TK, "packed weight", packed.data)
    if bias_N is not None:
        check_shape("bias_N", bias_N, packed.num_outputs)
    out_dtype = out_dtype or x_TK.dtype
    if packed.is_tiled:
        return cpu.linear_tiled(x_TK, packed.data, packed.num_outputs, bias_N, out_dtype=out_dtype)
    run = implementation(__name__, x_TK.device.type).linear
    return run(x_TK, packed.data, bias_N, out_dtype=out_dtype)
