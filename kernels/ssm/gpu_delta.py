"""The gated delta rule on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.ssm.meta import StateMeta
from hybrid_engine.kernels.ssm.triton_delta import delta_kernel

_STATE_ELEMENTS = 4096
"""Of a head's state in a program: 32 registers a thread."""


def gated_delta_rule(
    q_TGN: Tensor,
    k_TGN: Tensor,
    v_THD: Tensor,
    *,
    dt_THN: Tensor,
    b_TH: Tensor,
    A_H: Tensor,
    dt_bias_HN: Tensor | None,
    beta_scale: float,
    state_SHND: Tensor,
    meta: StateMeta,
    chunk: int,
) -> Tensor:
    """As reference.gated_delta_rule."""
    q_TGN, k_TGN, v_THD, dt_THN = (t if t.stride(2) == 1 else t.contiguous() for t in (q_TGN, k_TGN, v_THD, dt_THN))
    out_THD = torch.empty(v_THD.shape, dtype=v_THD.dtype, device=v_THD.device)
    if out_THD.numel() == 0:
        return out_THD
    num_heads, num_keys, num_values = state_SHND.shape[1:]
    A_H = A_H.contiguous()
    padded = next_power_of_2(num_keys)
    columns = max(1, min(next_power_of_2(num_values), _STATE_ELEMENTS // padded))
    delta_kernel[(len(meta.slots_R), num_heads, -(-num_values // columns))](
        q_TGN,
        k_TGN,
        v_THD,
        dt_THN,
        b_TH,
        A_H,
        A_H if dt_bias_HN is None else dt_bias_HN.contiguous(),
        state_SHND,
        out_THD,
        meta.query_starts,
        meta.slots_R,
        meta.has_history_R.view(torch.uint8),
        meta.capture_ends_C,
        meta.capture_slots_C,
        len(meta.capture_slots_C),
        beta_scale,
        num_keys**-0.5,
        *q_TGN.stride()[:2],
        *k_TGN.stride()[:2],
        *v_THD.stride()[:2],
        *dt_THN.stride()[:2],
        *b_TH.stride(),
        state_SHND.stride(0),
        HEADS_IN_GROUP=num_heads // q_TGN.shape[1],
        KEYS=num_keys,
        VALUES=num_values,
        IS_BY_ROW=dt_THN.shape[2] > 1,
        HAS_BIAS=dt_bias_HN is not None,
        ARE_SINGLES_ALONE=False,
        KEYS_PADDED=padded,
        PROGRAM=columns,
    )
    return out_THD
