"""A weight as its device multiplies it fastest, or in fewer bits."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_shape
from hybrid_engine.kernels.dispatch import implementation
from hybrid_engine.kernels.linear import cpu
from hybrid_engine.kernels.linear.int8 import BYTES, WORDS, pack_int8

QUANTIZATIONS = {"int8": "cpu", "w8a8": "cpu"}
"""How weights may be kept in fewer bits than their dtype has, and on which kind of device."""


class Form(Protocol):
    """What a packed weight lies in, and how it is multiplied there."""

    data: Tensor
    dtype: torch.dtype
    """Of the weight that was packed, and of inputs."""

    @property
    def num_bytes(self) -> int:
        """Bytes held."""

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear."""

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight, in its dtype."""


class PlainForm:
    """The weight as it is."""

    def __init__(self, weight_NK: Tensor, *, is_exact: bool = False) -> None:
        """is_exact: as PackedLinear.pack."""
        self.is_exact = is_exact
        self.data = weight_NK.contiguous()
        self.dtype = weight_NK.dtype
        self.num_bytes = self.data.numel() * self.data.element_size()

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear."""
        run = implementation("hybrid_engine.kernels.linear", x_TK.device.type).linear
        return run(x_TK, self.data, bias_N, out_dtype=out_dtype, is_exact=self.is_exact)

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight."""
        return self.data[ids_T]


class PackedLinear:
    """A weight [N, K] in the form that its device multiplies fastest. It replaces the plain weight, in memory too.

    An embedding tied to the head is one PackedLinear: linear() gives logits, rows() looks tokens up.
    """

    def __init__(self, form: Form, *, shape: tuple[int, int]) -> None:
        """Use pack()."""
        self.form = form
        self.num_outputs, self.num_inputs = shape

    @classmethod
    def pack(cls, weight_NK: Tensor, quantization: str | None = None, *, is_exact: bool = False) -> PackedLinear:
        """Pack a weight, float32 or bfloat16 (other dtypes raise ShapeError); the argument may be freed afterwards.

        Packing may keep a reference to the weight instead of copying it: don't write to it afterwards.
        quantization: one of QUANTIZATIONS, on a CPU; None keeps every bit. Raises ConfigError for any other.
        is_exact: a row gives the same bits whatever rows are beside it, which on a GPU costs time.
        """
        check_shape("weight_NK", weight_NK, None, None)
        check_dtype("weight_NK", weight_NK, *FLOATS)
        num_outputs, num_inputs = weight_NK.shape
        return cls(_form(weight_NK.detach(), quantization, is_exact), shape=(num_outputs, num_inputs))

    @property
    def data(self) -> Tensor:
        """The tensor that holds the weight."""
        return self.form.data

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weight that was packed and of the inputs that it multiplies."""
        return self.form.dtype

    @property
    def device(self) -> torch.device:
        """Where it lies, and where its inputs must."""
        return self.form.data.device

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.form.num_bytes

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight [T, K], in its dtype: an embedding lookup. ids_T: int64; IndexError when out of range."""
        check_shape("ids_T", ids_T, None)
        check_dtype("ids_T", ids_T, torch.int64)
        if self.device.type == "cpu":
            cpu.check_ids(ids_T, self.num_outputs)
        return self.form.rows(ids_T)

    def weight_NK(self) -> Tensor:
        """The weight as it is multiplied, in its dtype: a new tensor, or the one held."""
        if isinstance(self.form, PlainForm):
            return self.form.data
        return self.rows(torch.arange(self.num_outputs, device=self.device))


def _form(weight_NK: Tensor, quantization: str | None, is_exact: bool) -> Form:
    if quantization is None:
        is_tiled = weight_NK.device.type == "cpu" and cpu.can_tile(weight_NK)
        return cpu.TiledForm(weight_NK) if is_tiled else PlainForm(weight_NK, is_exact=is_exact)
    check_quantization(quantization, device_type=weight_NK.device.type)
    return pack_int8(weight_NK, WORDS if quantization == "int8" else BYTES)


def check_quantization(quantization: str | None, *, device_type: str) -> None:
    """Raise ConfigError unless weights can be kept so on this kind of device ('cpu', 'cuda')."""
    if quantization is None:
        return
    if quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization is {quantization!r}, must be one of {[*QUANTIZATIONS]}, or None")
    if (needed := QUANTIZATIONS[quantization]) != device_type:
        raise ConfigError(
            f"quantization is {quantization!r}, which is for device {needed!r}, the device is {device_type!r}: leave "
            f"quantization out, or change the device"
        )
