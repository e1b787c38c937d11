"""A mixture of experts on a CPU: rows sorted by expert, then each expert's two products over all of its rows at once.

So each expert that anybody chose is read once, by the products of kernels/linear; what surrounds them is little.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_engine.kernels import activation as plain
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.moe import reference

if TYPE_CHECKING:
    from hybrid_engine.kernels.moe import Activation


def pack(matrices_XNK: Tensor, quantization: str | None, is_exact: bool) -> tuple[PackedLinear, ...]:
    """Each expert's matrix by itself."""
    return tuple(PackedLinear.pack(matrix_NK, quantization, is_exact=is_exact) for matrix_NK in matrices_XNK)


def moe(
    x_TE: Tensor,
    weights_TC: Tensor,
    experts_TC: Tensor,
    *,
    gate_up: tuple[PackedLinear, ...],
    down: tuple[PackedLinear, ...],
    activation: Activation,
    gate_up_bias_XN: Tensor | None,
    down_bias_XE: Tensor | None,
    weighs_inputs: bool,
) -> Tensor:
    """As reference.moe."""
    num_tokens, num_chosen = experts_TC.shape
    experts_X = experts_TC.flatten()
    order_X = experts_X.argsort(stable=True)
    counts = experts_X.bincount(minlength=len(down)).tolist()
    x_XE = x_TE[order_X // num_chosen]
    if weighs_inputs:
        x_XE = (x_XE * weights_TC.flatten()[order_X, None]).to(x_TE.dtype)
    parts = []
    for expert, rows_XE in enumerate(x_XE.split(counts)):
        if len(rows_XE):
            gate_up_bias_N = None if gate_up_bias_XN is None else gate_up_bias_XN[expert]
            down_bias_E = None if down_bias_XE is None else down_bias_XE[expert]
            hidden_XI = activate(linear(rows_XE, gate_up[expert], gate_up_bias_N), activation)
            parts.append(linear(hidden_XI, down[expert], down_bias_E))
    by_token_XE = torch.empty(len(order_X), down[0].num_outputs, dtype=x_TE.dtype)
    if parts:
        by_token_XE[order_X] = torch.cat(parts)
    by_token_TCE = by_token_XE.unflatten(0, (num_tokens, num_chosen)).float()
    if not weighs_inputs:
        by_token_TCE = by_token_TCE * weights_TC[:, :, None]
    total_TE = by_token_TCE[:, 0]
    for place in range(1, num_chosen):  # in this order for every token: sum() takes one that suits the shape
        total_TE = total_TE + by_token_TCE[:, place]
    return total_TE.to(x_TE.dtype)


def activate(gate_up_XN: Tensor, activation: Activation) -> Tensor:
    """What goes into the second product: [X, I], the input's dtype."""
    if activation.kind in plain.KINDS:
        return plain.act_mul(gate_up_XN, kind=activation.kind)
    return reference.activate(gate_up_XN.float(), activation).to(gate_up_XN.dtype)
