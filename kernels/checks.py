"""Checks that every public function of kernels/ makes before it hands tensors on."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError

FLOATS = (torch.float32, torch.bfloat16)
"""What the fast CPU paths compute in."""


def check_shape(name: str, tensor: Tensor, *shape: int | None) -> None:
    """Raise ShapeError unless the tensor has this shape; None stands for any size."""
    got = tensor.shape
    if got == shape:  # what nearly every call asks: a layer makes dozens of these a step
        return
    if len(got) == len(shape):
        for want, size in zip(shape, got, strict=True):
            if want is not None and want != size:
                break
        else:
            return
    wanted = ", ".join("any" if want is None else str(want) for want in shape)
    raise ShapeError(f"{name} has shape {list(got)}, must be [{wanted}]")


def check_dtype(name: str, tensor: Tensor, *dtypes: torch.dtype) -> None:
    """Raise ShapeError unless the tensor has one of these dtypes."""
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShapeError(f"{name} is {str(tensor.dtype).removeprefix('torch.')}, must be {allowed}")


def check_same(name: str, tensor: Tensor, other_name: str, other: Tensor) -> None:
    """Raise ShapeError unless both tensors have the same dtype and device."""
    if tensor.dtype != other.dtype or tensor.device != other.device:
        raise ShapeError(
            f"{name} is {tensor.dtype} on {tensor.device}, must be like {other_name}: {other.dtype} on {other.device}"
        )
