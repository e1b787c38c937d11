"""Triton's interpreter, mended where it differs from a GPU. Seen with Triton 3.6 to 3.9.

As it comes, it multiplies the bits of bfloat16 numbers in `tl.dot` as if they were integers, cuts float32 off instead
of rounding, loses what rounding to fp8 carries over, and makes numbers of a single truth value where it spreads it over
a block.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def mend() -> None:
    """Replace what is wrong; once a process."""
    if getattr(InterpreterBuilder, "is_mended", False):
        return
    dot, cast, float_cast = (
        getattr(InterpreterBuilder, f"{n}") for n in ("create_dot", "cast_impl", "create_fp_to_fp")
    )

    splat = InterpreterBuilder.create_splat

    def create_splat(self: Any, block_type: Any, value: Any) -> Any:
        if value.data.dtype == np.bool_:
            return TensorHandle(np.full(block_type.shape, value.data.item()), tl.int1)
        return splat(self, block_type, value)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), *rest)

    def cast_impl(self: Any, source: Any, target_type: Any) -> Any:
        source_type, target = source.dtype.scalar, target_type.scalar
        if source_type == tl.float32 and target == tl.bfloat16:
            return TensorHandle(_round(source.data), target)
        if source_type == tl.bfloat16 and target != tl.bfloat16:
            wide = _widened(source)
            return wide if target == tl.float32 else cast(self, wide, target_type)
        return cast(self, source, target_type)

    def create_fp_to_fp(self: Any, source: Any, target_type: Any, mode: Any) -> Any:
        if source.dtype.scalar == tl.float32 and target_type.scalar == tl.float8e4nv:
            rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn)
            return TensorHandle(rounded.view(torch.uint8).numpy(), tl.float8e4nv)
        if {source.dtype.scalar, target_type.scalar} == {tl.bfloat16, tl.float32}:
            return cast_impl(self, source, target_type)
        return float_cast(self, source, target_type, mode)

    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_splat = create_splat
    InterpreterBuilder.is_mended = True


def _widened(handle: Any) -> Any:
    """A handle of bfloat16, which the interpreter keeps as 16-bit integers, as float32; others as they are."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _round(values: np.ndarray) -> np.ndarray:
    """float32 to the nearest bfloat16, ties to even, as 16-bit integers."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)
