"""The recurrent ops on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.native import NativeLibrary, num_threads
from hybrid_engine.kernels.ssm import fallback, fallback_delta, reference
from hybrid_engine.kernels.ssm.meta import StateMeta

MAX_WIDTH = 8
"""As in conv.h."""
MAX_STATES = 256
"""As in mamba1.h."""

_ROWS, _BATCH = "pli", "ppppppll"
library = NativeLibrary(
    __package__,
    {
        "causal_conv1d": 3 * _ROWS + "pplli" + _BATCH,
        "mamba1_scan": 4 * _ROWS + "pplplppplll" + _BATCH,
        "mamba2_scan": 3 * _ROWS + "pppppffplllll" + _BATCH,
        "gated_delta_rule": 6 * _ROWS + "ppfpllllll" + _BATCH,
        "gated_rms_norm": 3 * _ROWS + "pilllfii",
    },
)


def causal_conv1d(
    x_TI: Tensor, weight_IW: Tensor, bias_I: Tensor | None, *, conv_SIW: Tensor, meta: StateMeta, activation: str | None
) -> Tensor:
    """As reference.causal_conv1d."""
    native = library.load()
    if native is None or weight_IW.shape[1] > MAX_WIDTH:
        return fallback.causal_conv1d(x_TI, weight_IW, bias_I, conv_SIW=conv_SIW, meta=meta, activation=activation)
    x_TI, weight_IW, bias_I = _with_whole_rows(x_TI), _floats(weight_IW), _floats_or_none(bias_I)
    out_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype)
    native.causal_conv1d(
        *_rows(x_TI),
        *_rows(out_TI),
        *_rows(conv_SIW),
        weight_IW.data_ptr(),
        _pointer(bias_I),
        *weight_IW.shape,
        activation == "silu",
        *_batch(meta),
        num_threads(),
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
    native = library.load()
    if native is None or A_IN.shape[1] > MAX_STATES:
        return fallback.mamba1_scan(
            x_TI,
            dt_TI,
            A_IN=A_IN,
            B_TN=B_TN,
            C_TN=C_TN,
            D_I=D_I,
            z_TI=z_TI,
            dt_bias_I=dt_bias_I,
            state_SIN=state_SIN,
            meta=meta,
        )
    x_TI, dt_TI = _with_whole_rows(x_TI), _with_whole_rows(dt_TI)
    z_TI = None if z_TI is None else _with_whole_rows(z_TI)
    B_TN, C_TN = _with_whole_rows(B_TN.float()), _with_whole_rows(C_TN.float())
    A_IN, D_I, dt_bias_I = _floats(A_IN), _floats(D_I), _floats_or_none(dt_bias_I)
    out_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype)
    native.mamba1_scan(
        *_rows(x_TI),
        *_rows(dt_TI),
        *(_rows(z_TI) if z_TI is not None else (None, 0, 0)),
        *_rows(out_TI),
        A_IN.data_ptr(),
        B_TN.data_ptr(),
        B_TN.stride(0),
        C_TN.data_ptr(),
        C_TN.stride(0),
        D_I.data_ptr(),
        _pointer(dt_bias_I),
        state_SIN.data_ptr(),
        state_SIN.stride(0),
        *A_IN.shape,
        *_batch(meta),
        num_threads(),
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
    native = library.load()
    if native is None:
        return fallback.mamba2_scan(
            x_THD,
            dt_TH,
            A_H=A_H,
            B_TGN=B_TGN,
            C_TGN=C_TGN,
            D_H=D_H,
            dt_bias_H=dt_bias_H,
            dt_limit=dt_limit,
            state_SHDN=state_SHDN,
            meta=meta,
            chunk=chunk,
        )
    x_TI, dt_TH = _with_whole_rows(x_THD.flatten(1)), _with_whole_rows(dt_TH)
    A_H, B_TGN, C_TGN, D_H = _floats(A_H), _floats(B_TGN), _floats(C_TGN), _floats(D_H)
    dt_bias_H = _floats_or_none(dt_bias_H)
    out_THD = torch.empty(x_THD.shape, dtype=x_THD.dtype)
    native.mamba2_scan(
        *_rows(x_TI),
        *_rows(dt_TH),
        *_rows(out_THD),
        A_H.data_ptr(),
        B_TGN.data_ptr(),
        C_TGN.data_ptr(),
        D_H.data_ptr(),
        _pointer(dt_bias_H),
        *dt_limit,
        state_SHDN.data_ptr(),
        state_SHDN.stride(0),
        *x_THD.shape[1:],
        *B_TGN.shape[1:],
        *_batch(meta),
        num_threads(),
    )
    return out_THD


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
    native = library.load()
    if native is None:
        return fallback_delta.gated_delta_rule(
            q_TGN,
            k_TGN,
            v_THD,
            dt_THN=dt_THN,
            b_TH=b_TH,
            A_H=A_H,
            dt_bias_HN=dt_bias_HN,
            beta_scale=beta_scale,
            state_SHND=state_SHND,
            meta=meta,
            chunk=chunk,
        )
    rows = [_with_whole_rows(tensor.flatten(1)) for tensor in (q_TGN, k_TGN, v_THD, dt_THN, b_TH)]
    A_H, dt_bias_HN = _floats(A_H), _floats_or_none(dt_bias_HN)
    out_THD = torch.empty(v_THD.shape, dtype=v_THD.dtype)
    native.gated_delta_rule(
        *(field for tensor in rows for field in _rows(tensor)),
        *_rows(out_THD),
        A_H.data_ptr(),
        _pointer(dt_bias_HN),
        beta_scale,
        state_SHND.data_ptr(),
        state_SHND.stride(0),
        v_THD.shape[1],
        *q_TGN.shape[1:],
        v_THD.shape[2],
        dt_THN.shape[2],
        *_batch(meta),
        num_threads(),
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
    native = library.load()
    if native is None:
        return reference.gated_rms_norm(
            x_TI,
            gate_TI,
            weight_I,
            eps=eps,
            group_size=group_size,
            norm_before_gate=norm_before_gate,
            activation=activation,
        )
    x_TI, gate_TI, weight_I = _with_whole_rows(x_TI), _with_whole_rows(gate_TI), weight_I.contiguous()
    out_TI = torch.empty(x_TI.shape, dtype=x_TI.dtype)
    native.gated_rms_norm(
        *_rows(x_TI),
        *_rows(gate_TI),
        *_rows(out_TI),
        weight_I.data_ptr(),
        weight_I.dtype == torch.bfloat16,
        *x_TI.shape,
        group_size,
        eps,
        norm_before_gate,
        activation == "silu",
        num_threads(),
    )
    return out_TI


def _rows(x_TI: Tensor) -> tuple[int, int, bool]:
    return x_TI.data_ptr(), x_TI.stride(0), x_TI.dtype == torch.bfloat16


def _with_whole_rows(x_TI: Tensor) -> Tensor:
    """The tensor itself where each row lies in one stretch, else a copy."""
    return x_TI if x_TI.stride(1) == 1 else x_TI.contiguous()


def _floats(tensor: Tensor) -> Tensor:
    return tensor.float().contiguous()


def _floats_or_none(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _floats(tensor)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _batch(meta: StateMeta) -> tuple[int, ...]:
    """StateMeta as BATCH_ARGUMENTS of batch.h."""
    return (
        meta.query_starts.data_ptr(),
        meta.slots_R.data_ptr(),
        meta.has_history_R.data_ptr(),
        meta.capture_ends_C.data_ptr(),
        meta.capture_requests_C.data_ptr(),
        meta.capture_slots_C.data_ptr(),
        len(meta.slots_R),
        len(meta.capture_slots_C),
    )
