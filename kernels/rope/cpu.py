"""Rotary embedding on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.native import NativeLibrary, num_threads
from hybrid_engine.kernels.rope import reference

library = NativeLibrary(
    __package__, {"rotate_float": "ppppllllll", "rotate_bf16": "ppppllllll", "rope_table": "ppppllf"}
)


def apply_rope(q_THD: Tensor, k_TKD: Tensor, *, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.apply_rope."""
    native = library.load()
    if native is None:
        return reference.apply_rope(q_THD, k_TKD, cos_TD=cos_TD, sin_TD=sin_TD)
    cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
    run = native.rotate_bf16 if q_THD.dtype == torch.bfloat16 else native.rotate_float
    return _rotate(run, q_THD, cos_TD, sin_TD), _rotate(run, k_TKD, cos_TD, sin_TD)


def _rotate(run, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:  # type: ignore[no-untyped-def]
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    num_tokens, num_heads, head_size = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    run(
        x_THD.data_ptr(),
        out_THD.data_ptr(),
        cos_TD.data_ptr(),
        sin_TD.data_ptr(),
        num_tokens,
        num_heads,
        head_size,
        cos_TD.shape[1],
        x_THD.stride(0),
        x_THD.stride(1),
        num_threads(),
    )
    return out_THD


def rope_table(positions_T: Tensor, frequencies_F: Tensor, *, magnitude: float) -> tuple[Tensor, Tensor]:
    """As reference.rope_table. Of the few angles of a decode step torch's cosines take a hundred times as long."""
    native = library.load()
    if native is None:
        return reference.rope_table(positions_T, frequencies_F, magnitude=magnitude)
    positions_T, frequencies_F = positions_T.contiguous(), frequencies_F.contiguous()
    shape = len(positions_T), 2 * len(frequencies_F)
    cos_TD, sin_TD = torch.empty(shape), torch.empty(shape)
    pointers = (positions_T.data_ptr(), frequencies_F.data_ptr(), cos_TD.data_ptr(), sin_TD.data_ptr())
    native.rope_table(*pointers, len(positions_T), len(frequencies_F), magnitude, num_threads())
    return cos_TD, sin_TD
