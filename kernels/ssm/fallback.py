"""The recurrent ops in torch alone, with as few loops over tokens as torch allows: for where no C++ can be built."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.ssm.meta import StateMeta


def causal_conv1d(
    x_TI: Tensor, weight_IW: Tensor, bias_I: Tensor | None, *, conv_SIW: Tensor, meta: StateMeta, activation: str | None
) -> Tensor:
    """As reference.causal_conv1d, for all requests at once.

    Each request's inputs are laid out behind its history of W - 1 rows. So token t of request r lies at
    t + (r + 1) * (W - 1), and the state after the tokens below t begins at t + r * (W - 1).
    """
    width = weight_IW.shape[1]
    num_requests = len(meta.slots_R)
    rows_R, rows_T = torch.arange(num_requests), _rows_of_tokens(meta)
    inputs_XI = torch.empty(len(x_TI) + num_requests * (width - 1), x_TI.shape[1])
    positions_T = torch.arange(len(x_TI)) + (rows_T + 1) * (width - 1)
    inputs_XI[positions_T] = x_TI.float()
    window = torch.arange(width - 1)
    before_RW = (meta.query_starts[:-1] + rows_R * (width - 1))[:, None] + window
    inputs_XI[before_RW] = states_before(conv_SIW, meta, rows_R).float().transpose(1, 2)
    y_TI = torch.zeros(()) if bias_I is None else bias_I.float()
    for k, weight_I in enumerate(weight_IW.float().T):
        y_TI = y_TI + inputs_XI[positions_T - (width - 1) + k] * weight_I
    after_RW = (meta.query_starts[1:] + rows_R * (width - 1))[:, None] + window
    after_CW = (meta.capture_ends_C + meta.capture_requests_C * (width - 1))[:, None] + window
    rows_R = _rows_with_tokens(meta)
    conv_SIW[meta.capture_slots_C] = inputs_XI[after_CW].transpose(1, 2).to(conv_SIW.dtype)
    conv_SIW[meta.slots_R[rows_R]] = inputs_XI[after_RW[rows_R]].transpose(1, 2).to(conv_SIW.dtype)
    return (F.silu(y_TI) if activation == "silu" else y_TI).to(x_TI.dtype)


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
    """As reference.mamba1_scan: all requests go on by one token together, the longest first in the batch."""
    x, dt_TI, A_IN, B_TN, C_TN = x_TI.float(), _step_sizes(dt_TI, dt_bias_I), A_IN.float(), B_TN.float(), C_TN.float()
    added_TI = dt_TI * x
    lengths = meta.query_starts.diff()
    rows_R = lengths.argsort(descending=True, stable=True)[: len(_rows_with_tokens(meta))]
    starts_R, lengths_R = meta.query_starts[rows_R].long(), lengths[rows_R].tolist()
    captures = _captures_by_step(meta, rows_R)
    state_RIN = states_before(state_SIN, meta, rows_R)
    y_TI = torch.empty_like(x)
    num_running = len(lengths_R)
    for step in range(max(lengths_R, default=0)):
        while lengths_R[num_running - 1] <= step:
            num_running -= 1
        tokens, running_RIN = starts_R[:num_running] + step, state_RIN[:num_running]
        running_RIN *= torch.exp(dt_TI[tokens, :, None] * A_IN)
        running_RIN += added_TI[tokens, :, None] * B_TN[tokens, None]
        y_TI[tokens] = (running_RIN @ C_TN[tokens, :, None]).squeeze(2)
        for index, slot in captures[step + 1]:
            state_SIN[slot] = state_RIN[index]
    state_SIN[meta.slots_R[rows_R]] = state_RIN
    y_TI += D_I.float() * x
    return (y_TI if z_TI is None else y_TI * F.silu(z_TI.float())).to(x_TI.dtype)


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
    """As reference.mamba2_scan: single tokens of many requests together, the rest as matrix products over pieces."""
    x, B_TGN, C_TGN = x_THD.float(), B_TGN.float(), C_TGN.float()
    dt_TH = _step_sizes(dt_TH, dt_bias_H).clamp(*dt_limit)
    decay_TH = dt_TH.double() * A_H.double()  # summed up over a piece: differences of large sums must stay exact
    added_THD = dt_TH[:, :, None] * x
    y_THD = torch.empty_like(x)
    lengths = meta.query_starts.diff()
    singles_R = (lengths == 1).nonzero().flatten()
    if len(singles_R):
        tokens = meta.query_starts[singles_R].long()
        y_THD[tokens], state_RHDN = _single_step(
            added_THD[tokens],
            decay_TH[tokens],
            B_TGN[tokens],
            C_TGN[tokens],
            states_before(state_SHDN, meta, singles_R),
        )
        state_SHDN[meta.slots_R[singles_R]] = state_RHDN
    for row in (lengths > 1).nonzero().flatten():
        state_HDN = states_before(state_SHDN, meta, row[None])[0]
        for begin, end, slots in pieces(meta, int(row), chunk):
            piece = slice(begin, end)
            y_THD[piece], state_HDN = _piece(added_THD[piece], decay_TH[piece], B_TGN[piece], C_TGN[piece], state_HDN)
            state_SHDN[slots] = state_HDN
        state_SHDN[meta.slots_R[row]] = state_HDN
    is_single_C = lengths[meta.capture_requests_C] == 1
    single_rows_C = meta.capture_requests_C[is_single_C]
    state_SHDN[meta.capture_slots_C[is_single_C]] = state_SHDN[meta.slots_R[single_rows_C]]
    return (y_THD + D_H.float()[:, None] * x).to(x_THD.dtype)


def _single_step(
    added_RHD: Tensor, decay_RH: Tensor, B_RGN: Tensor, C_RGN: Tensor, state_RHDN: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of each request: (y [R, H, D], states after it)."""
    heads_per_group = added_RHD.shape[1] // B_RGN.shape[1]
    B_RHN, C_RHN = (g_RGN.repeat_interleave(heads_per_group, 1) for g_RGN in (B_RGN, C_RGN))
    state_RHDN = state_RHDN * decay_RH.exp().float()[:, :, None, None]
    state_RHDN += added_RHD[:, :, :, None] * B_RHN[:, :, None]
    return (state_RHDN @ C_RHN[:, :, :, None]).squeeze(3), state_RHDN


def _piece(
    added_QHD: Tensor, decay_QH: Tensor, B_QGN: Tensor, C_QGN: Tensor, state_HDN: Tensor
) -> tuple[Tensor, Tensor]:
    """Q tokens of one request as matrix products: (y [Q, H, D], state after them). Heads lie as [G, H / G]."""
    groups = (B_QGN.shape[1], -1)
    sums_HQ = decay_QH.T.cumsum(1)
    between_HQQ = (sums_HQ[:, :, None] - sums_HQ[:, None]).tril().exp().float().tril()
    weights_GQQ = C_QGN.transpose(0, 1) @ B_QGN.permute(1, 2, 0)
    mixed_HQQ = (between_HQQ.unflatten(0, groups) * weights_GQQ[:, None]).flatten(0, 1)
    added_HQD = added_QHD.transpose(0, 1)
    from_state_HQD = (C_QGN.transpose(0, 1)[:, None] @ state_HDN.unflatten(0, groups).transpose(2, 3)).flatten(0, 1)
    y_HQD = mixed_HQQ @ added_HQD + sums_HQ.exp().float()[:, :, None] * from_state_HQD
    to_end_HQ = (sums_HQ[:, -1:] - sums_HQ).exp().float()
    weighted_HDQ = (added_HQD * to_end_HQ[:, :, None]).transpose(1, 2)
    new_HDN = (weighted_HDQ.unflatten(0, groups) @ B_QGN.transpose(0, 1)[:, None]).flatten(0, 1)
    return y_HQD.transpose(0, 1), state_HDN * sums_HQ[:, -1].exp().float()[:, None, None] + new_HDN


def _step_sizes(dt_TX: Tensor, bias_X: Tensor | None) -> Tensor:
    return F.softplus(dt_TX.float() if bias_X is None else dt_TX.float() + bias_X.float())


def states_before(states_S: Tensor, meta: StateMeta, rows_R: Tensor) -> Tensor:
    """A copy of each row's state, zeros where it has none."""
    states_R = states_S[meta.slots_R[rows_R]]
    states_R[~meta.has_history_R[rows_R]] = 0
    return states_R


def _rows_of_tokens(meta: StateMeta) -> Tensor:
    return torch.repeat_interleave(meta.query_starts.diff())


def _rows_with_tokens(meta: StateMeta) -> Tensor:
    return meta.query_starts.diff().nonzero().flatten()


def _captures_by_step(meta: StateMeta, rows_R: Tensor) -> dict[int, list[tuple[int, int]]]:
    """By tokens consumed: (index into rows_R, slot) of each state that is kept then."""
    index_of = {row: index for index, row in enumerate(rows_R.tolist())}
    captures: dict[int, list[tuple[int, int]]] = defaultdict(list)
    starts = meta.query_starts.tolist()
    for row, end, slot in _captures(meta):
        captures[end - starts[row]].append((index_of[row], slot))
    return captures


def pieces(meta: StateMeta, row: int, chunk: int) -> Iterator[tuple[int, int, list[int]]]:
    """(begin, end, slots) of pieces of at most `chunk` tokens; those slots get the state at the end."""
    begin, last = meta.query_starts[row : row + 2].tolist()
    slots_at: dict[int, list[int]] = defaultdict(list)
    for capture_row, end, slot in _captures(meta):
        if capture_row == row:
            slots_at[end].append(slot)
    for end in sorted({*range(begin + chunk, last, chunk), *slots_at, last}):
        yield begin, end, slots_at[end]
        begin = end


def _captures(meta: StateMeta) -> Iterator[tuple[int, int, int]]:
    """(row, packed end, slot) of each capture."""
    fields = (meta.capture_requests_C, meta.capture_ends_C, meta.capture_slots_C)
    return zip(*(field.tolist() for field in fields), strict=True)
