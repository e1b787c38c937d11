"""The recurrent ops one token after the other, in float64: obviously right, slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.ssm.meta import StateMeta

Step = Callable[[int, Tensor], Tensor]
"""Takes a token's packed offset and the state before it, returns the state after it."""
KEY_EPS = 1e-6
"""What keeps a key of zeros from being divided by zero."""


def causal_conv1d(
    x_TI: Tensor, weight_IW: Tensor, bias_I: Tensor | None, *, conv_SIW: Tensor, meta: StateMeta, activation: str | None
) -> Tensor:
    """Slide a window over each request's inputs; the state is the window without its newest input."""
    out_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)

    def step(token: int, inputs_IW: Tensor) -> Tensor:
        window_IW = torch.cat([inputs_IW, x_TI[token, :, None].double()], dim=1)
        y_I = (window_IW * weight_IW.double()).sum(1)
        if bias_I is not None:
            y_I = y_I + bias_I.double()
        out_TI[token] = F.silu(y_I) if activation == "silu" else y_I
        return window_IW[:, 1:]

    _run(step, conv_SIW, meta)
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
    """state = exp(dt A) state + dt B x; y = C state + D x, times silu(z)."""
    out_TI = torch.empty_like(x_TI, memory_format=torch.contiguous_format)
    bias_I = torch.zeros(()) if dt_bias_I is None else dt_bias_I

    def step(token: int, state_IN: Tensor) -> Tensor:
        x_I, B_N, C_N = x_TI[token].double(), B_TN[token].double(), C_TN[token].double()
        dt_I = F.softplus(dt_TI[token].double() + bias_I.double())
        state_IN = torch.exp(dt_I[:, None] * A_IN.double()) * state_IN + (dt_I * x_I)[:, None] * B_N
        y_I = state_IN @ C_N + D_I.double() * x_I
        out_TI[token] = y_I if z_TI is None else y_I * F.silu(z_TI[token].double())
        return state_IN

    _run(step, state_SIN, meta)
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
    """As mamba1_scan, with one decay for a whole head and B and C shared by the heads of a group; chunk is ignored."""
    out_THD = torch.empty_like(x_THD, memory_format=torch.contiguous_format)
    heads_per_group = x_THD.shape[1] // B_TGN.shape[1]
    bias_H = torch.zeros(()) if dt_bias_H is None else dt_bias_H

    def step(token: int, state_HDN: Tensor) -> Tensor:
        x_HD = x_THD[token].double()
        B_HN, C_HN = (g_TGN[token].double().repeat_interleave(heads_per_group, 0) for g_TGN in (B_TGN, C_TGN))
        dt_H = F.softplus(dt_TH[token].double() + bias_H.double()).clamp(*dt_limit)
        added_HDN = dt_H[:, None, None] * x_HD[:, :, None] * B_HN[:, None, :]
        state_HDN = torch.exp(dt_H * A_H.double())[:, None, None] * state_HDN + added_HDN
        out_THD[token] = (state_HDN * C_HN[:, None, :]).sum(2) + D_H.double()[:, None] * x_HD
        return state_HDN

    _run(step, state_SHDN, meta)
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
    """state = decay state; state = state + beta k (v - k state); y = q state; chunk is ignored."""
    out_THD = torch.empty_like(v_THD, memory_format=torch.contiguous_format)
    heads_per_group = v_THD.shape[1] // q_TGN.shape[1]
    bias_HN = torch.zeros(()) if dt_bias_HN is None else dt_bias_HN

    def step(token: int, state_HND: Tensor) -> Tensor:
        q_HN, k_HN = (unit(g_TGN[token].double()).repeat_interleave(heads_per_group, 0) for g_TGN in (q_TGN, k_TGN))
        beta_H = beta_scale * torch.sigmoid(b_TH[token].double())
        dt_HN = F.softplus(dt_THN[token].double() + bias_HN.double())
        state_HND = torch.exp(dt_HN * A_H.double()[:, None])[:, :, None] * state_HND
        held_HD = (k_HN[:, :, None] * state_HND).sum(1)
        delta_HD = beta_H[:, None] * (v_THD[token].double() - held_HD)
        state_HND = state_HND + k_HN[:, :, None] * delta_HD[:, None, :]
        out_THD[token] = (q_HN[:, :, None] * state_HND).sum(1) * q_HN.shape[1] ** -0.5
        return state_HND

    _run(step, state_SHND, meta)
    return out_THD


def unit(x_XN: Tensor) -> Tensor:
    """Rows of length one; rows of nearly no length stay shorter."""
    return x_XN * torch.rsqrt(x_XN.square().sum(-1, keepdim=True) + KEY_EPS)


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
    """Norm groups of columns, with the activated gate multiplied in before or after; in float32."""
    x, gate = x_TI.float(), gate_TI.float()
    gate = F.silu(gate) if activation == "silu" else torch.sigmoid(gate)
    if not norm_before_gate:
        x = x * gate
    groups = x.unflatten(-1, (-1, group_size))
    normed = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + eps)).flatten(-2) * weight_I.float()
    return (normed * gate if norm_before_gate else normed).to(x_TI.dtype)


def _run(step: Step, states_S: Tensor, meta: StateMeta) -> None:
    """Advance each request's state by its tokens; write what is to be captured on the way and the last at the end."""
    starts = meta.query_starts.tolist()
    for row, slot in enumerate(meta.slots_R.tolist()):
        if starts[row] == starts[row + 1]:
            continue
        has_history = bool(meta.has_history_R[row])
        state = states_S[slot].double() if has_history else torch.zeros_like(states_S[slot], dtype=torch.float64)
        captures = list(_captures_of(row, meta))
        for token in range(starts[row], starts[row + 1]):
            state = step(token, state)
            for capture_slot in (slot for end, slot in captures if end == token + 1):
                states_S[capture_slot] = state
        states_S[slot] = state


def _captures_of(row: int, meta: StateMeta) -> Iterator[tuple[int, int]]:
    """(packed end, slot) of each capture of a request."""
    requests, ends, slots = (t.tolist() for t in (meta.capture_requests_C, meta.capture_ends_C, meta.capture_slots_C))
    for request, end, slot in zip(requests, ends, slots, strict=True):
        if request == row:
            yield end, slot
