"""Activations on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.activation import reference
from hybrid_engine.kernels.native import NativeLibrary, num_threads

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}

library = NativeLibrary(
    __package__,
    {f"{kind}_mul_{dtype}": "pplll" for kind in ("silu", "gelu_tanh") for dtype in _NAMES.values()}
    | {f"{kind}_{dtype}": "ppl" for kind in ("silu", "gelu_tanh", "sigmoid") for dtype in _NAMES.values()},
)


def act(x: Tensor, *, kind: str) -> Tensor:
    """As reference.act."""
    native = library.load()
    if native is None:
        return reference.act(x, kind=kind)
    x = x.contiguous()
    out = torch.empty_like(x)
    run = getattr(native, f"{kind}_{_NAMES[x.dtype]}")
    run(x.data_ptr(), out.data_ptr(), x.numel(), num_threads())
    return out


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """As reference.act_mul."""
    native = library.load()
    if native is None:
        return reference.act_mul(gate_up_TC, kind=kind)
    if kind == "gelu":  # torch has vectors of erf, which round alike for whole tensors only
        gate_TI, up_TI = gate_up_TC.float().chunk(2, 1)
        return (F.gelu(gate_TI.contiguous()) * up_TI).to(gate_up_TC.dtype)
    if gate_up_TC.stride(1) != 1:
        gate_up_TC = gate_up_TC.contiguous()
    num_tokens, num_columns = gate_up_TC.shape
    out_TI = torch.empty(num_tokens, num_columns // 2, dtype=gate_up_TC.dtype)
    run = getattr(native, f"{kind}_mul_{_NAMES[gate_up_TC.dtype]}")
    run(gate_up_TC.data_ptr(), out_TI.data_ptr(), num_tokens, num_columns // 2, gate_up_TC.stride(0), num_threads())
    return out_TI
