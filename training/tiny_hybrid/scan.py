"""The selective scan of Mamba-1 with its gradient, chunk by chunk, in plain torch.

    state[t] = exp(dt[t] A) state[t - 1] + u[t] B[t]        y[t] = C[t] state[t]

with u = dt x. Kept for the way back are the states between chunks only; those inside are computed again. Within a chunk
all is done for all its tokens at once, but for one multiply-add each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

CHUNK_ELEMENTS = {"cpu": 1 << 19, "cuda": 1 << 27}
"""Elements of a tensor of one chunk's states: on a CPU few enough for its cache."""


def selective_scan(dt_RTI: Tensor, u_RTI: Tensor, *, A_IN: Tensor, B_RTN: Tensor, C_RTN: Tensor) -> Tensor:
    """Run the scan over R sequences of T tokens from zero states and return y_RTI."""
    with torch.autocast(dt_RTI.device.type, enabled=False):
        y_TRI = _Scan.apply(*_flip(dt_RTI, u_RTI), A_IN, *_flip(B_RTN, C_RTN))
    return y_TRI.transpose(0, 1)


def _flip(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Time first, so that a step's values lie together."""
    return tuple(tensor.transpose(0, 1).contiguous() for tensor in tensors)


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dt: Tensor, u: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        state = dt.new_zeros(dt.shape[1], *A.shape)
        y, between = torch.empty_like(u), []
        for chunk in _chunks(dt, A):
            between.append(state)
            states = _states(state, *_terms(dt[chunk], u[chunk], A, B[chunk]))
            y[chunk] = (states @ C[chunk, :, :, None]).squeeze(-1)
            state = states[-1].clone()
        ctx.save_for_backward(dt, u, A, B, C, *between)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        (grad_y,) = grads
        dt, u, A, B, C, *between = ctx.saved_tensors
        grad_dt, grad_u, grad_B, grad_C = (torch.empty_like(x) for x in (dt, u, B, C))
        grad_A, carried = torch.zeros_like(A), torch.zeros_like(between[0])
        for chunk, state in reversed(list(zip(_chunks(dt, A), between, strict=True))):
            decay, added = _terms(dt[chunk], u[chunk], A, B[chunk])
            states = _states(state, decay, added)
            g_y = grad_y[chunk]
            grad_C[chunk] = (g_y[:, :, None, :] @ states).squeeze(2)
            # What flows into each state: from its own output, and from the state after it.
            flow = torch.mul(g_y[..., None], C[chunk, :, :, None].transpose(2, 3), out=added)
            flow[-1] += carried
            for t in range(len(flow) - 2, -1, -1):
                flow[t].addcmul_(decay[t + 1], flow[t + 1])
            carried = decay[0] * flow[0]
            grad_u[chunk] = (flow @ B[chunk, :, :, None]).squeeze(-1)
            grad_B[chunk] = (u[chunk, :, None, :] @ flow).squeeze(2)
            # The decay multiplied the state before: its gradient is flow * before, and d exp(x) is exp(x) dx.
            inner = flow.mul_(decay)
            inner[1:] *= states[:-1]
            inner[0] *= state
            grad_dt[chunk] = (inner * A).sum(-1)
            grad_A += torch.einsum("trin,tri->in", inner, dt[chunk])
        return grad_dt, grad_u, grad_A, grad_B, grad_C


def _chunks(dt: Tensor, A: Tensor) -> list[slice]:
    num_tokens, num_rows = dt.shape[:2]
    size = max(1, CHUNK_ELEMENTS[dt.device.type] // (num_rows * A.numel()))
    return [slice(start, start + size) for start in range(0, num_tokens, size)]


def _terms(dt: Tensor, u: Tensor, A: Tensor, B: Tensor) -> tuple[Tensor, Tensor]:
    """exp(dt A) and u B of each token."""
    return (dt[..., None] * A).exp_(), u[..., None] * B[:, :, None, :]


def _states(state: Tensor, decay: Tensor, added: Tensor) -> Tensor:
    """The states after each token of a chunk that begins with a state."""
    states = torch.empty_like(added)
    for t in range(len(added)):
        state = torch.addcmul(added[t], decay[t], state, out=states[t])
    return states
