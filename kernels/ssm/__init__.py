"""Recurrent layers: causal convolution, the scans of Mamba-1 and Mamba-2, the gated delta rule, the gated norm.

States live in slots of a cache and are updated in place. S(p), the state after exactly p tokens of a sequence, is the
same however the sequence was split into steps, up to the rounding of float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_shape
from hybrid_engine.kernels.dispatch import implementation
from hybrid_engine.kernels.ssm.meta import StateMeta

__all__ = [
    "PIECE_TOKENS",
    "StateMeta",
    "causal_conv1d",
    "gated_delta_rule",
    "gated_rms_norm",
    "mamba1_scan",
    "mamba2_scan",
]

PIECE_TOKENS = 64
"""Tokens that Mamba-2 and the delta rule compute at once unless told otherwise."""


def causal_conv1d(
    x_TI: Tensor,
    weight_IW: Tensor,
    bias_I: Tensor | None,
    *,
    conv_SIW: Tensor,
    meta: StateMeta,
    activation: str | None = "silu",
) -> Tensor:
    """Convolve each channel over the last W tokens of its request and advance the conv states: [T, I], x's dtype.

    x_TI: float32 or bfloat16, rows may be a slice of wider ones. weight_IW: the newest input's weight is the last.
    conv_SIW [S, I, W - 1]: float32 or bfloat16, the inputs before the next token, the oldest first; updated in place.
    activation: "silu" or None. Raises ShapeError when shapes or dtypes don't fit.
    """
    check_shape("x_TI", x_TI, None, None)
    check_dtype("x_TI", x_TI, *FLOATS)
    num_channels = x_TI.shape[1]
    check_shape("weight_IW", weight_IW, num_channels, None)
    if bias_I is not None:
        check_shape("bias_I", bias_I, num_channels)
    check_shape("conv_SIW", conv_SIW, None, num_channels, weight_IW.shape[1] - 1)
    _check_states("conv_SIW", conv_SIW, x_TI, meta, FLOATS)
    if activation not in ("silu", None):
        raise ShapeError(f"activation is {activation!r}, must be 'silu' or None")
    run = implementation(__name__, x_TI.device.type).causal_conv1d
    return run(x_TI, weight_IW, bias_I, conv_SIW=conv_SIW, meta=meta, activation=activation)


def mamba1_scan(
    x_TI: Tensor,
    dt_TI: Tensor,
    *,
    A_IN: Tensor,
    B_TN: Tensor,
    C_TN: Tensor,
    D_I: Tensor,
    z_TI: Tensor | None = None,
    dt_bias_I: Tensor | None = None,
    state_SIN: Tensor,
    meta: StateMeta,
) -> Tensor:
    """Run the selective scan over each request and advance the states: [T, I], x's dtype, times silu(z) if given.

    x_TI, dt_TI, B_TN, C_TN, z_TI: float32 or bfloat16. dt goes through softplus, after dt_bias was added.
    A_IN: as it multiplies dt, so negative. state_SIN: float32, updated in place.
    Raises ShapeError when shapes or dtypes don't fit. Source: the Mamba paper, section 3.2, algorithm 2.
    """
    check_shape("x_TI", x_TI, None, None)
    num_tokens, num_channels = x_TI.shape
    check_shape("A_IN", A_IN, num_channels, None)
    state_size = A_IN.shape[1]
    check_shape("dt_TI", dt_TI, num_tokens, num_channels)
    check_shape("B_TN", B_TN, num_tokens, state_size)
    check_shape("C_TN", C_TN, num_tokens, state_size)
    check_shape("D_I", D_I, num_channels)
    if z_TI is not None:
        check_shape("z_TI", z_TI, num_tokens, num_channels)
        check_dtype("z_TI", z_TI, *FLOATS)
    if dt_bias_I is not None:
        check_shape("dt_bias_I", dt_bias_I, num_channels)
    check_shape("state_SIN", state_SIN, None, num_channels, state_size)
    for name, tensor in (("x_TI", x_TI), ("dt_TI", dt_TI), ("B_TN", B_TN), ("C_TN", C_TN)):
        check_dtype(name, tensor, *FLOATS)
    _check_states("state_SIN", state_SIN, x_TI, meta, (torch.float32,))
    run = implementation(__name__, x_TI.device.type).mamba1_scan
    return run(
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


def mamba2_scan(
    x_THD: Tensor,
    dt_TH: Tensor,
    *,
    A_H: Tensor,
    B_TGN: Tensor,
    C_TGN: Tensor,
    D_H: Tensor,
    dt_bias_H: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    state_SHDN: Tensor,
    meta: StateMeta,
    chunk: int = PIECE_TOKENS,
) -> Tensor:
    """Run Mamba-2's scan (state space duality) over each request and advance the states: [T, H, D], x's dtype.

    x_THD, dt_TH, B_TGN, C_TGN: float32 or bfloat16; H heads share G groups in order. dt goes through softplus, after
    dt_bias was added, and is then cut to dt_limit. A_H: as it multiplies dt, so negative. state_SHDN: float32, updated
    in place. chunk: tokens that are computed at once where matrix products do the work; the C++ goes token by token.
    Raises ShapeError when shapes or dtypes don't fit. Source: the Mamba-2 paper, section 6.
    """
    check_shape("x_THD", x_THD, None, None, None)
    num_tokens, num_heads, head_size = x_THD.shape
    check_shape("dt_TH", dt_TH, num_tokens, num_heads)
    check_shape("A_H", A_H, num_heads)
    check_shape("B_TGN", B_TGN, num_tokens, None, None)
    check_shape("C_TGN", C_TGN, *B_TGN.shape)
    check_shape("D_H", D_H, num_heads)
    if dt_bias_H is not None:
        check_shape("dt_bias_H", dt_bias_H, num_heads)
    check_shape("state_SHDN", state_SHDN, None, num_heads, head_size, B_TGN.shape[2])
    for name, tensor in (("x_THD", x_THD), ("dt_TH", dt_TH), ("B_TGN", B_TGN), ("C_TGN", C_TGN)):
        check_dtype(name, tensor, *FLOATS)
    _check_states("state_SHDN", state_SHDN, x_THD, meta, (torch.float32,))
    if B_TGN.shape[1] < 1 or num_heads % B_TGN.shape[1]:
        raise ShapeError(f"{num_heads} heads can't share {B_TGN.shape[1]} groups: must be a multiple")
    if chunk < 1:
        raise ShapeError(f"chunk is {chunk}, must be at least 1")
    run = implementation(__name__, x_THD.device.type).mamba2_scan
    return run(
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


def gated_delta_rule(
    q_TGN: Tensor,
    k_TGN: Tensor,
    v_THD: Tensor,
    *,
    dt_THN: Tensor,
    b_TH: Tensor,
    A_H: Tensor,
    dt_bias_HN: Tensor | None = None,
    beta_scale: float = 1.0,
    state_SHND: Tensor,
    meta: StateMeta,
    chunk: int = PIECE_TOKENS,
) -> Tensor:
    """Run the gated delta rule over each request and advance the states: [T, H, D], v's dtype.

    A token lets the state decay by exp(A * softplus(dt + dt_bias)), reads what it holds at the key, and adds there beta
    times what the value differs by; the query reads the result. Queries and keys are scaled to length one first, then
    queries by N ** -0.5; beta is beta_scale * sigmoid(b).

    q_TGN, k_TGN, v_THD, dt_THN, b_TH: float32 or bfloat16; H heads share G groups of queries and keys in order.
    dt_THN: a decay for each row of the state (Kimi Delta Attention), or [T, H, 1], one a head (Gated DeltaNet);
    dt_bias_HN has the same last dimension. A_H: as it multiplies dt, so negative. beta_scale: 2 lets a state change its
    sign. state_SHND: float32, updated in place. chunk: as in mamba2_scan.
    Raises ShapeError when shapes or dtypes don't fit.
    Source: Gated Delta Networks, arXiv 2412.06464, equation 10; Kimi Linear, arXiv 2510.26692, for decays a row.
    """
    check_shape("v_THD", v_THD, None, None, None)
    num_tokens, num_heads, head_size = v_THD.shape
    check_shape("q_TGN", q_TGN, num_tokens, None, None)
    check_shape("k_TGN", k_TGN, *q_TGN.shape)
    num_groups, key_size = q_TGN.shape[1:]
    check_shape("dt_THN", dt_THN, num_tokens, num_heads, 1 if dt_THN.shape[-1] == 1 else key_size)
    check_shape("b_TH", b_TH, num_tokens, num_heads)
    check_shape("A_H", A_H, num_heads)
    if dt_bias_HN is not None:
        check_shape("dt_bias_HN", dt_bias_HN, *dt_THN.shape[1:])
    check_shape("state_SHND", state_SHND, None, num_heads, key_size, head_size)
    inputs = {"q_TGN": q_TGN, "k_TGN": k_TGN, "v_THD": v_THD, "dt_THN": dt_THN, "b_TH": b_TH}
    for name, tensor in inputs.items():
        check_dtype(name, tensor, *FLOATS)
    _check_states("state_SHND", state_SHND, v_THD, meta, (torch.float32,))
    if num_groups < 1 or num_heads % num_groups:
        raise ShapeError(f"{num_heads} heads can't share {num_groups} groups: must be a multiple")
    if chunk < 1:
        raise ShapeError(f"chunk is {chunk}, must be at least 1")
    run = implementation(__name__, v_THD.device.type).gated_delta_rule
    return run(
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


def gated_rms_norm(
    x_TI: Tensor,
    gate_TI: Tensor,
    weight_I: Tensor,
    *,
    eps: float,
    group_size: int | None = None,
    norm_before_gate: bool = False,
    activation: str = "silu",
) -> Tensor:
    """RMSNorm of x * act(gate), or with norm_before_gate of x, then times act(gate): in float32, cast at the end.

    x_TI, gate_TI: float32 or bfloat16. group_size: columns that are normed together; None: all of them.
    activation: "silu" or "sigmoid".
    Raises ShapeError when shapes or dtypes don't fit.
    """
    check_shape("x_TI", x_TI, None, None)
    check_shape("gate_TI", gate_TI, *x_TI.shape)
    check_shape("weight_I", weight_I, x_TI.shape[1])
    for name, tensor in (("x_TI", x_TI), ("gate_TI", gate_TI), ("weight_I", weight_I)):
        check_dtype(name, tensor, *FLOATS)
    if activation not in ("silu", "sigmoid"):
        raise ShapeError(f"activation is {activation!r}, must be 'silu' or 'sigmoid'")
    size = x_TI.shape[1] if group_size is None else group_size
    if size < 1 or x_TI.shape[1] % size:
        raise ShapeError(f"group_size is {size}, must divide the {x_TI.shape[1]} columns of x_TI")
    run = implementation(__name__, x_TI.device.type).gated_rms_norm
    options = {"group_size": size, "norm_before_gate": norm_before_gate, "activation": activation}
    return run(x_TI, gate_TI, weight_I, eps=eps, **options)


def _check_states(name: str, states_S: Tensor, x_T: Tensor, meta: StateMeta, dtypes: tuple[torch.dtype, ...]) -> None:
    """Raise ShapeError unless the states can be updated in place and meta names slots and tokens that exist."""
    check_dtype(name, states_S, *dtypes)
    if states_S.device != x_T.device:
        raise ShapeError(f"{name} is on {states_S.device}, must be on {x_T.device} with the inputs")
    if len(states_S) and not states_S[0].is_contiguous():
        raise ShapeError(f"{name} must be contiguous within a slot")
    lowest, highest = meta.host.slot_range
    if lowest < 1 or highest >= len(states_S):
        raise ShapeError(f"slots {lowest} .. {highest} of the step must be within [1, {len(states_S)})")
    if meta.host.num_tokens != x_T.shape[0]:
        raise ShapeError(f"meta tells of {meta.host.num_tokens} tokens, the inputs have {x_T.shape[0]}")
