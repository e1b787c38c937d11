"""RMSNorm on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.native import NativeLibrary, num_threads
from hybrid_engine.kernels.norm import reference

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}

library = NativeLibrary(
    __package__,
    {
        f"{name}_{dtype}": letters
        for name, letters in (
            ("rms_norm", "pppiilllf"),
            ("add_rms_norm", "pppppiilllf"),
            ("norm_add_norm", "ppppppiilllf"),
        )
        for dtype in _NAMES.values()
    },
)


def rms_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    """As reference.rms_norm."""
    native = library.load()
    if native is None or weight_E.dtype not in _NAMES:
        return reference.rms_norm(x_TE, weight_E, eps=eps, zero_centered=zero_centered)
    x = _as_rows(x_TE)
    weight_E = weight_E.contiguous()
    out_TE = torch.empty(x_TE.shape, dtype=x.dtype)
    run = native.rms_norm_bf16 if x.dtype == torch.bfloat16 else native.rms_norm_float
    run(
        x.data_ptr(),
        out_TE.data_ptr(),
        weight_E.data_ptr(),
        weight_E.dtype == torch.bfloat16,
        zero_centered,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        eps,
        num_threads(),
    )
    return out_TE


def add_rms_norm(
    x_TE: Tensor, residual_TE: Tensor, weight_E: Tensor, *, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """As reference.add_rms_norm."""
    native = library.load()
    if native is None or weight_E.dtype not in _NAMES:
        return reference.add_rms_norm(x_TE, residual_TE, weight_E, eps=eps, zero_centered=zero_centered)
    x, residual_TE, weight_E = _as_rows(x_TE), residual_TE.contiguous(), weight_E.contiguous()
    out_TE, sum_TE = torch.empty(x_TE.shape, dtype=x.dtype), torch.empty(x_TE.shape, dtype=x.dtype)
    run = native.add_rms_norm_bf16 if x.dtype == torch.bfloat16 else native.add_rms_norm_float
    run(
        x.data_ptr(),
        residual_TE.data_ptr(),
        out_TE.data_ptr(),
        sum_TE.data_ptr(),
        weight_E.data_ptr(),
        weight_E.dtype == torch.bfloat16,
        zero_centered,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        eps,
        num_threads(),
    )
    return out_TE, sum_TE


def norm_add_norm(
    x_TE: Tensor, residual_TE: Tensor, *, post_weight_E: Tensor, pre_weight_E: Tensor, eps: float, zero_centered: bool
) -> tuple[Tensor, Tensor]:
    """As reference.norm_add_norm."""
    native = library.load()
    if native is None or post_weight_E.dtype not in _NAMES or pre_weight_E.dtype != post_weight_E.dtype:
        return reference.norm_add_norm(
            x_TE,
            residual_TE,
            post_weight_E=post_weight_E,
            pre_weight_E=pre_weight_E,
            eps=eps,
            zero_centered=zero_centered,
        )
    x, residual_TE = _as_rows(x_TE), residual_TE.contiguous()
    post_weight_E, pre_weight_E = post_weight_E.contiguous(), pre_weight_E.contiguous()
    out_TE, sum_TE = torch.empty(x_TE.shape, dtype=x.dtype), torch.empty(x_TE.shape, dtype=x.dtype)
    run = native.norm_add_norm_bf16 if x.dtype == torch.bfloat16 else native.norm_add_norm_float
    run(
        x.data_ptr(),
        residual_TE.data_ptr(),
        out_TE.data_ptr(),
        sum_TE.data_ptr(),
        post_weight_E.data_ptr(),
        pre_weight_E.data_ptr(),
        post_weight_E.dtype == torch.bfloat16,
        zero_centered,
        x.shape[0],
        x.shape[1],
        x.stride(0),
        eps,
        num_threads(),
    )
    return out_TE, sum_TE


def _as_rows(x: Tensor) -> Tensor:
    """The tensor as rows of its last dimension, copied only where its strides don't allow a view."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x
    return x.reshape(-1, x.shape[-1]).contiguous()
