"""Rotary embedding on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.rope import reference
from hybrid_engine.kernels.rope.triton_rope import rotate_kernel

_PROGRAM_ELEMENTS = 2048

rope_table = reference.rope_table


def apply_rope(q_THD: Tensor, k_TKD: Tensor, *, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Tensor]:
    """As reference.apply_rope."""
    cos_TD, sin_TD = cos_TD.contiguous(), sin_TD.contiguous()
    return _rotate(q_THD, cos_TD, sin_TD), _rotate(k_TKD, cos_TD, sin_TD)


def _rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    if x_THD.stride(2) != 1:
        x_THD = x_THD.contiguous()
    num_tokens, num_heads, head_size = x_THD.shape
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    padded = next_power_of_2(head_size)
    heads = max(1, min(_PROGRAM_ELEMENTS // padded, next_power_of_2(num_heads)))
    if out_THD.numel():
        rotate_kernel[(num_tokens, -(-num_heads // heads))](
            x_THD,
            cos_TD,
            sin_TD,
            out_THD,
            num_heads,
            *x_THD.stride()[:2],
            ROTARY=cos_TD.shape[1],
            SIZE=head_size,
            HEADS=heads,
            PADDED=padded,
        )
    return out_THD
