"""The gated delta rule in torch alone: single tokens of many requests together, the rest as matrix products."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.ssm.fallback import pieces, states_before
from hybrid_engine.kernels.ssm.meta import StateMeta
from hybrid_engine.kernels.ssm.reference import unit

_ROW_CHUNK = 16
"""Tokens at once where each row of the state has a decay of its own: scores are summed up pair by pair there."""


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
    heads_per_group = v_THD.shape[1] // q_TGN.shape[1]
    q_THN, k_THN = (unit(x_TGN.float()).repeat_interleave(heads_per_group, 1) for x_TGN in (q_TGN, k_TGN))
    q_THN = q_THN * q_THN.shape[2] ** -0.5
    v, beta_TH = v_THD.float(), beta_scale * torch.sigmoid(b_TH.float())
    dt_THN = F.softplus(dt_THN.float() if dt_bias_HN is None else dt_THN.float() + dt_bias_HN.float())
    decay_THN = dt_THN.double() * A_H.double()[:, None]  # summed up over a piece: differences must stay exact
    y_THD = torch.empty_like(v)
    lengths = meta.query_starts.diff()
    singles_R = (lengths == 1).nonzero().flatten()
    if len(singles_R):
        tokens = meta.query_starts[singles_R].long()
        state_RHND = states_before(state_SHND, meta, singles_R) * decay_THN[tokens].exp().float()[..., None]
        k_RHN, q_RHN = k_THN[tokens], q_THN[tokens]
        held_RHD = (k_RHN[:, :, None] @ state_RHND).squeeze(2)
        delta_RHD = beta_TH[tokens][..., None] * (v[tokens] - held_RHD)
        state_RHND += k_RHN[..., None] * delta_RHD[:, :, None]
        y_THD[tokens] = (q_RHN[:, :, None] @ state_RHND).squeeze(2)
        state_SHND[meta.slots_R[singles_R]] = state_RHND
    chunk = chunk if decay_THN.shape[2] == 1 else min(chunk, _ROW_CHUNK)
    for row in (lengths > 1).nonzero().flatten():
        state_HND = states_before(state_SHND, meta, row[None])[0]
        for begin, end, slots in pieces(meta, int(row), chunk):
            piece = slice(begin, end)
            y_THD[piece], state_HND = _piece(
                q_THN[piece], k_THN[piece], v[piece], decay_THN[piece], beta_TH[piece], state_HND
            )
            state_SHND[slots] = state_HND
        state_SHND[meta.slots_R[row]] = state_HND
    is_single_C = lengths[meta.capture_requests_C] == 1
    single_rows_C = meta.capture_requests_C[is_single_C]
    state_SHND[meta.capture_slots_C[is_single_C]] = state_SHND[meta.slots_R[single_rows_C]]
    return y_THD.to(v_THD.dtype)


def _piece(
    q_QHN: Tensor, k_QHN: Tensor, v_QHD: Tensor, decay_QHN: Tensor, beta_QH: Tensor, state_HND: Tensor
) -> tuple[Tensor, Tensor]:
    """Q tokens of one request: (y [Q, H, D], state after them).

    What token i writes depends on what earlier ones wrote: d_i + beta_i sum_{j < i} a_ij d_j = beta_i (v_i - k_i S),
    S being the state before the piece and a_ij what key i meets of key j after the decays between them.
    """
    q_HQN, k_HQN, v_HQD, sums_HQN = (x.transpose(0, 1) for x in (q_QHN, k_QHN, v_QHD, decay_QHN.cumsum(0)))
    beta_HQ1 = beta_QH.T[:, :, None]
    from_start_HQN = sums_HQN.exp().float()
    met_HQQ = beta_HQ1 * _scores(k_HQN, k_HQN, sums_HQN).tril(-1)
    wanted_HQD = beta_HQ1 * (v_HQD - (from_start_HQN * k_HQN) @ state_HND)
    delta_HQD = torch.linalg.solve_triangular(met_HQQ, wanted_HQD, upper=False, unitriangular=True)
    y_HQD = (from_start_HQN * q_HQN) @ state_HND + _scores(q_HQN, k_HQN, sums_HQN).tril() @ delta_HQD
    to_end_HQN = (sums_HQN[:, -1:] - sums_HQN).exp().float()
    state_HND = from_start_HQN[:, -1, :, None] * state_HND + (to_end_HQN * k_HQN).transpose(1, 2) @ delta_HQD
    return y_HQD.transpose(0, 1), state_HND


def _scores(x_HQN: Tensor, k_HQN: Tensor, sums_HQN: Tensor) -> Tensor:
    """What each token's row meets of the keys up to its own after the decays between: [H, Q, Q]; above it, anything."""
    between = sums_HQN[:, :, None] - sums_HQN[:, None]
    between = between.clamp(max=0).exp().float()
    if sums_HQN.shape[2] == 1:
        return between.squeeze(3) * (x_HQN @ k_HQN.transpose(1, 2))
    return (x_HQN[:, :, None] * k_HQN[:, None] * between).sum(3)
