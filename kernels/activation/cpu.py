"""Gated activations on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.activation import reference
from hybrid_engine.kernels.native import NativeLibrary, num_threads

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}

library = NativeLibrary(
    __package__, {f"{kind}_{dtype}": "pplll" for kind in ("silu", "gelu_tanh") for dtype in _NAMES.values()}
)


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """As reference.act_mul."""
    native = library.load() if kind != "gelu" else None  # torch has vectors of erf
    if native is None:
        return reference.act_mul(gate_up_TC, kind=kind)
    if gate_up_TC.stride(1) != 1:
        gate_up_TC = gate_up_TC.contiguous()
    num_tokens, num_columns = gate_up_TC.shape
    out_TI = torch.empty(num_tokens, num_columns // 2, dtype=gate_up_TC.dtype)
    run = getattr(native, f"{kind}_{_NAMES[gate_up_TC.dtype]}")
    run(gate_up_TC.data_ptr(), out_TI.data_ptr(), num_tokens, num_columns // 2, gate_up_TC.stride(0), num_threads())
    return out_TI
