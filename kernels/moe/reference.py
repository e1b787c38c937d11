"""A mixture of experts in plain torch: one token and one of its experts after the other, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.activation import act

if TYPE_CHECKING:
    from hybrid_engine.kernels.moe import Activation


def pack(matrices_XNK: Tensor, quantization: None, is_exact: bool) -> Tensor:
    """The stack as it is."""
    assert quantization is None, quantization
    return matrices_XNK


def moe(
    x_TE: Tensor,
    weights_TC: Tensor,
    experts_TC: Tensor,
    *,
    gate_up: Tensor,
    down: Tensor,
    activation: Activation,
    gate_up_bias_XN: Tensor | None,
    down_bias_XE: Tensor | None,
    weighs_inputs: bool,
) -> Tensor:
    """The weighted sum of what each token's experts give."""
    out_TE = torch.zeros(len(x_TE), down.shape[1], device=x_TE.device)
    for token, experts in enumerate(experts_TC.tolist()):
        for place, expert in enumerate(experts):
            weight = weights_TC[token, place]
            x_E = x_TE[token].float() * (weight if weighs_inputs else 1)
            gate_up_N = gate_up[expert].float() @ x_E
            if gate_up_bias_XN is not None:
                gate_up_N += gate_up_bias_XN[expert]
            one_E = down[expert].float() @ activate(gate_up_N, activation)
            if down_bias_XE is not None:
                one_E += down_bias_XE[expert]
            out_TE[token] += one_E * (1 if weighs_inputs else weight)
    return out_TE.to(x_TE.dtype)


def activate(gate_up: Tensor, activation: Activation) -> Tensor:
    """What goes into the second product, from [..., N]; float32."""
    if not activation.is_gated:
        return gate_up.relu().square()
    gate, up = gate_up.chunk(2, -1)
    if activation.kind == "swiglu_clamped":
        gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        return gate * act(activation.alpha * gate, kind="sigmoid") * (up + 1)
    if activation.kind == "silu":
        return F.silu(gate) * up
    return F.gelu(gate, approximate="tanh" if activation.kind == "gelu_tanh" else "none") * up
