"""The gated delta rule on a GPU: pieces of each request as matrix products, single tokens by themselves."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.ssm.meta import StateMeta
from hybrid_engine.kernels.ssm.triton_delta import delta_update_kernel
from hybrid_engine.kernels.ssm.triton_delta_pieces import delta_output_kernel, delta_pass_kernel, delta_prepare_kernel
from hybrid_engine.kernels.triton_math import dot_precision

_MIN_DOT = 16
_STATE_ELEMENTS = 4096
"""Of a head's state in a program that takes one step: 32 registers a thread."""
_COLUMNS = {torch.bfloat16: 64, torch.float32: 32}
"""Columns of keys and of values that a program takes at a time where all pieces are computed at once."""
_PASS = {torch.bfloat16: (32, 8), torch.float32: (16, 4)}
"""Those that a program takes from piece to piece, and its warps, by the inputs' dtype."""


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
    is_by_row = dt_THN.shape[2] > 1
    num_heads, num_keys, num_values = state_SHND.shape[1:]
    A_H = A_H.contiguous()
    dt_bias = A_H if dt_bias_HN is None else dt_bias_HN.contiguous()
    sizes = {
        "HEADS_IN_GROUP": num_heads // q_TGN.shape[1],
        "KEYS": num_keys,
        "VALUES": num_values,
        "IS_BY_ROW": is_by_row,
    }
    has_history_R = meta.has_history_R.view(torch.uint8)  # a bool is no mask in Triton's interpreter
    if meta.host.has_single_queries or meta.is_exact:
        padded = next_power_of_2(num_keys)
        columns = max(1, min(next_power_of_2(num_values), _STATE_ELEMENTS // padded))
        delta_update_kernel[(len(meta.slots_R), num_heads, -(-num_values // columns))](
            q_TGN,
            k_TGN,
            v_THD,
            dt_THN,
            b_TH,
            A_H,
            dt_bias,
            state_SHND,
            out_THD,
            meta.query_starts,
            meta.slots_R,
            has_history_R,
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
            HAS_BIAS=dt_bias_HN is not None,
            KEYS_PADDED=padded,
            PROGRAM=columns,
            IS_SERIAL=meta.is_exact,
            **sizes,
        )
    if meta.host.most_queries == 1 or meta.is_exact:
        return out_THD
    pieces = meta.pieces(chunk)
    columns = _COLUMNS[v_THD.dtype]
    num_tokens = max(_MIN_DOT, next_power_of_2(chunk))
    options = {
        **sizes,
        "TOKENS": num_tokens,
        "KEYS_PADDED": max(_MIN_DOT, next_power_of_2(num_keys)),
        "PRECISION": dot_precision(v_THD.dtype),
        "num_warps": 8,
        "num_stages": 1,
    }
    grid = (pieces.count, num_heads)
    empty = partial(torch.empty, dtype=torch.float32, device=v_THD.device)
    matrices = empty(*grid, num_tokens, num_tokens)
    inverses = torch.zeros_like(matrices)
    keys, values = empty(*grid, num_tokens, num_keys), empty(*grid, num_tokens, num_values)
    decays = empty(*grid, num_tokens, dt_THN.shape[2], dtype=torch.float64)
    before = empty(*grid, num_keys, num_values)
    delta_prepare_kernel[grid](
        q_TGN,
        k_TGN,
        v_THD,
        dt_THN,
        b_TH,
        A_H,
        dt_bias,
        pieces.bounds,
        matrices,
        inverses,
        keys,
        values,
        decays,
        beta_scale,
        *q_TGN.stride()[:2],
        *k_TGN.stride()[:2],
        *v_THD.stride()[:2],
        *dt_THN.stride()[:2],
        *b_TH.stride(),
        HAS_BIAS=dt_bias_HN is not None,
        KEY_COLUMNS=min(columns, options["KEYS_PADDED"]),
        COLUMNS=columns,
        **options,
    )
    pass_columns, pass_warps = _PASS[v_THD.dtype]
    delta_pass_kernel[(len(meta.slots_R), num_heads, -(-num_values // pass_columns))](
        k_TGN,
        pieces.bounds,
        keys,
        values,
        decays,
        before,
        pieces.row_pieces,
        pieces.slots,
        state_SHND,
        meta.slots_R,
        has_history_R,
        *k_TGN.stride()[:2],
        state_SHND.stride(0),
        COLUMNS=pass_columns,
        **options | {"num_warps": pass_warps},
    )
    delta_output_kernel[(*grid, -(-num_values // columns))](
        q_TGN,
        pieces.bounds,
        before,
        values,
        decays,
        matrices,
        out_THD,
        num_keys**-0.5,
        *q_TGN.stride()[:2],
        COLUMNS=columns,
        **options,
    )
    return out_THD
