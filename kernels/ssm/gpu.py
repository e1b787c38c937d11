"""The recurrent ops on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.ssm.gpu_delta import gated_delta_rule
from hybrid_engine.kernels.ssm.meta import StateMeta
from hybrid_engine.kernels.ssm.triton_conv import conv_kernel, conv_states_kernel, conv_update_kernel
from hybrid_engine.kernels.ssm.triton_mamba1 import mamba1_kernel
from hybrid_engine.kernels.ssm.triton_mamba2 import (
    pass_states_kernel,
    piece_outputs_kernel,
    piece_states_kernel,
    update_kernel,
)
from hybrid_engine.kernels.ssm.triton_norm import gated_norm_kernel
from hybrid_engine.kernels.triton_math import dot_precision

__all__ = ["causal_conv1d", "gated_delta_rule", "gated_rms_norm", "mamba1_scan", "mamba2_scan"]

_MIN_DOT = 16
_CONV_TOKENS, _CONV_CHANNELS = 16, 128
_SCAN_CHANNELS = 32
"""Channels of Mamba-1 in a program: one warp, a state of a few registers for each thread."""
_PASS_ELEMENTS = 1024
_UPDATE_ELEMENTS = 4096


def causal_conv1d(
    x_TI: Tensor, weight_IW: Tensor, bias_I: Tensor | None, *, conv_SIW: Tensor, meta: StateMeta, activation: str | None
) -> Tensor:
    """As reference.causal_conv1d."""
    x_TI, weight_IW = _with_whole_rows(x_TI), weight_IW.contiguous()
    (num_tokens, num_channels), width = x_TI.shape, weight_IW.shape[1]
    out_TI = _empty_like(x_TI)
    if out_TI.numel() == 0:
        return out_TI
    num_rows, blocks = len(meta.slots_R), -(-num_channels // _CONV_CHANNELS)
    bias_I = weight_IW if bias_I is None else bias_I.contiguous()
    options = {
        "WIDTH": width,
        "HAS_BIAS": bias_I is not weight_IW,
        "IS_SILU": activation == "silu",
        "CHANNELS": _CONV_CHANNELS,
    }
    rows, captures = _rows(meta), _captures(meta)
    sizes = (num_channels, x_TI.stride(0), conv_SIW.stride(0))
    padded = next_power_of_2(max(width - 1, 1))
    if meta.host.most_queries == 1 and not meta.is_exact:
        conv_update_kernel[(num_rows, blocks)](
            x_TI, weight_IW, bias_I, conv_SIW, out_TI, *rows, *captures, *sizes, PADDED=padded, **options
        )
        return out_TI
    conv_kernel[(num_tokens // _CONV_TOKENS + num_rows, blocks)](
        x_TI, weight_IW, bias_I, conv_SIW, out_TI, *rows, num_rows, *sizes, TOKENS=_CONV_TOKENS, **options
    )
    if width > 1:
        conv_states_kernel[(num_rows, blocks)](
            x_TI, conv_SIW, *rows, *captures, *sizes, WIDTH=width, CHANNELS=_CONV_CHANNELS, PADDED=padded
        )
    return out_TI


def mamba1_scan(
    x_TI: Tensor,
    dt_TI: Tensor,
    *,
    A_IN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    D_I: Tensor,
    z_TI: Tensor | None,
    dt_bias_I: Tensor | None,
    state_SIN: Tensor,
    meta: StateMeta,
) -> Tensor:
    """As reference.mamba1_scan."""
    x_TI, dt_TI, B_TN, C_TN = (_with_whole_rows(tensor) for tensor in (x_TI, dt_TI, B_TN, C_TN))
    z = x_TI if z_TI is None else _with_whole_rows(z_TI)
    A_IN, D_I = A_IN.contiguous(), D_I.contiguous()
    num_channels, num_states = A_IN.shape
    out_TI = _empty_like(x_TI)
    if out_TI.numel() == 0:
        return out_TI
    mamba1_kernel[(len(meta.slots_R), -(-num_channels // _SCAN_CHANNELS))](
        x_TI,
        dt_TI,
        A_IN,
        B_TN,
        C_TN,
        D_I,
        z,
        D_I if dt_bias_I is None else dt_bias_I.contiguous(),
        state_SIN,
        out_TI,
        *_rows(meta),
        *_captures(meta),
        num_channels,
        *(tensor.stride(0) for tensor in (x_TI, dt_TI, B_TN, C_TN, z, state_SIN)),
        NUM_STATES=num_states,
        HAS_Z=z_TI is not None,
        HAS_BIAS=dt_bias_I is not None,
        CHANNELS=_SCAN_CHANNELS,
        PADDED=next_power_of_2(num_states),
        num_warps=1 if num_states <= 32 else 4,
    )
    return out_TI


def mamba2_scan(
    x_THD: Tensor,
    dt_TH: Tensor,
    *,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor | None,
    dt_limit: tuple[float, float],
    state_SHDN: Tensor,
    meta: StateMeta,
    chunk: int,
) -> Tensor:
    """As reference.mamba2_scan."""
    x_THD, B_TGN, C_TGN = (t if t.stride(2) == 1 else t.contiguous() for t in (x_THD, B_TGN, C_TGN))
    out_THD = _empty_like(x_THD)
    if out_THD.numel() == 0:
        return out_THD
    A_H, D_H = A_H.contiguous(), D_H.contiguous()
    dt_bias = A_H if dt_bias_H is None else dt_bias_H.contiguous()
    num_heads, size, num_states = state_SHDN.shape[1:]
    if num_states == 0:
        return (x_THD * D_H[:, None]).to(x_THD.dtype)
    options = {
        "HEADS_IN_GROUP": num_heads // B_TGN.shape[1],
        "SIZE": size,
        "STATES": num_states,
        "STATES_PADDED": max(_MIN_DOT, next_power_of_2(num_states)),
    }
    x_strides, dt_strides = x_THD.stride()[:2], dt_TH.stride()
    b_strides, c_strides = B_TGN.stride()[:2], C_TGN.stride()[:2]
    if meta.host.has_single_queries or meta.is_exact:
        size_program = max(1, min(next_power_of_2(size), _UPDATE_ELEMENTS // options["STATES_PADDED"]))
        update_kernel[(len(meta.slots_R), num_heads, -(-size // size_program))](
            x_THD,
            dt_TH,
            A_H,
            B_TGN,
            C_TGN,
            D_H,
            dt_bias,
            state_SHDN,
            out_THD,
            *_rows(meta),
            *_captures(meta),
            *dt_limit,
            *x_strides,
            *dt_strides,
            *b_strides,
            *c_strides,
            state_SHDN.stride(0),
            HAS_BIAS=dt_bias_H is not None,
            SIZE_PROGRAM=size_program,
            IS_SERIAL=meta.is_exact,
            **options,
        )
    if meta.host.most_queries == 1 or meta.is_exact:
        return out_THD
    pieces = meta.pieces(chunk)
    options |= {
        "TOKENS": max(_MIN_DOT, next_power_of_2(chunk)),
        "SIZE_PADDED": max(_MIN_DOT, next_power_of_2(size)),
        "PRECISION": dot_precision(x_THD.dtype),
        "num_warps": 8 if options["STATES_PADDED"] > 128 else 4,
    }
    grid = (pieces.count, num_heads)
    # By piece and head: what it adds to the state, then the state before it; step sizes; decays, summed up.
    states = torch.empty(*grid, size, num_states, dtype=torch.float32, device=x_THD.device)
    steps = torch.empty(*grid, options["TOKENS"], dtype=torch.float32, device=x_THD.device)
    decays = torch.empty(*grid, options["TOKENS"], dtype=torch.float64, device=x_THD.device)
    piece_states_kernel[grid](
        x_THD,
        dt_TH,
        A_H,
        B_TGN,
        dt_bias,
        pieces.bounds,
        states,
        steps,
        decays,
        *dt_limit,
        *x_strides,
        *dt_strides,
        *b_strides,
        HAS_BIAS=dt_bias_H is not None,
        num_stages=1,
        **options,
    )
    pass_states_kernel[(len(meta.slots_R), num_heads, -(-size * num_states // _PASS_ELEMENTS))](
        states,
        decays,
        pieces.row_pieces,
        pieces.slots,
        state_SHDN,
        *_rows(meta)[1:],
        state_SHDN.stride(0),
        ELEMENTS=size * num_states,
        TOKENS=options["TOKENS"],
        PROGRAM=_PASS_ELEMENTS,
    )
    piece_outputs_kernel[grid](
        x_THD,
        B_TGN,
        C_TGN,
        D_H,
        pieces.bounds,
        states,
        steps,
        decays,
        out_THD,
        *x_strides,
        *b_strides,
        *c_strides,
        num_stages=1,
        **options,
    )
    return out_THD


def gated_rms_norm(
    x_TI: Tensor,
    gate_TI: Tensor,
    weight_I: Tensor,
    *,
    eps: float,
    group_size: int,
    norm_before_gate: bool,
    activation: str,
) -> Tensor:
    """As reference.gated_rms_norm."""
    x_TI, gate_TI = _with_whole_rows(x_TI), _with_whole_rows(gate_TI)
    out_TI = _empty_like(x_TI)
    padded = next_power_of_2(group_size)
    if out_TI.numel():
        gated_norm_kernel[(len(x_TI), x_TI.shape[1] // group_size)](
            x_TI,
            gate_TI,
            weight_I.contiguous(),
            out_TI,
            x_TI.stride(0),
            gate_TI.stride(0),
            eps,
            SIZE=group_size,
            PADDED=padded,
            NORM_FIRST=norm_before_gate,
            IS_SILU=activation == "silu",
            num_warps=min(16, max(4, padded // 512)),
        )
    return out_TI


def _rows(meta: StateMeta) -> tuple[Tensor, Tensor, Tensor]:
    # A bool as the byte that it is: Triton's interpreter makes no mask of it otherwise.
    return meta.query_starts, meta.slots_R, meta.has_history_R.view(torch.uint8)


def _captures(meta: StateMeta) -> tuple[Tensor, Tensor, int]:
    return meta.capture_ends_C, meta.capture_slots_C, len(meta.capture_slots_C)


def _empty_like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _with_whole_rows(x_TI: Tensor) -> Tensor:
    """The tensor itself where each row lies in one stretch, else a copy."""
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()
