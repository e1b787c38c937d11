"""Activations on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.activation import reference
from hybrid_engine.kernels.activation.triton_activation import act_mul_kernel

_COLUMNS = 1024

act = reference.act


def act_mul(gate_up_TC: Tensor, *, kind: str) -> Tensor:
    """As reference.act_mul."""
    if gate_up_TC.stride(1) != 1:
        gate_up_TC = gate_up_TC.contiguous()
    num_tokens, num_columns = gate_up_TC.shape[0], gate_up_TC.shape[1] // 2
    out_TI = torch.empty(num_tokens, num_columns, dtype=gate_up_TC.dtype, device=gate_up_TC.device)
    if out_TI.numel():
        act_mul_kernel[(num_tokens, -(-num_columns // _COLUMNS))](
            gate_up_TC, out_TI, num_columns, gate_up_TC.stride(0), KIND=kind, COLUMNS=_COLUMNS
        )
    return out_TI
