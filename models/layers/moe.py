"""A mixture of experts: each token goes through a few gated MLPs that a router chooses for it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From scores [T, X] and a count: weights (float32) and indices of each token's experts, both [T, count]."""


def softmax_then_top(scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts with their shares among all, which then don't add up to 1 (Jamba)."""
    weights_TC, experts_TC = scores_TX.float().softmax(1).topk(num_chosen, dim=1)
    return weights_TC, experts_TC


def top_then_softmax(scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts with their shares among themselves (Granite)."""
    top_TC, experts_TC = scores_TX.float().topk(num_chosen, dim=1)
    return top_TC.softmax(1), experts_TC


class Experts(WeightModule):
    """The gated MLPs of all experts, gate and up of each in one product."""

    def __init__(
        self,
        *,
        gate_up: tuple[Part, ...],
        down: tuple[Part, ...],
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
    ) -> None:
        """gate_up, down: the checkpoint's tensors, which together hold the experts one after the other."""
        super().__init__()
        self.activation = activation
        self.shapes = {
            "gate_up": (num_experts, 2 * intermediate_size, hidden_size),
            "down": (num_experts, hidden_size, intermediate_size),
        }
        self.packed: dict[str, list[PackedLinear]] = {}
        self.weights = (Weight("gate_up", gate_up), Weight("down", down))

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Pack each expert by itself."""
        matrices_XNK = tensor.view(self.shapes[weight.attribute])
        self.packed[weight.attribute] = [PackedLinear.pack(matrix_NK) for matrix_NK in matrices_XNK]

    def forward(self, x_TE: Tensor, weights_TC: Tensor, experts_TC: Tensor) -> Tensor:
        """[T, E], C experts a token. A token's result doesn't depend on what else is in the batch."""
        num_tokens, num_chosen = experts_TC.shape
        experts_X = experts_TC.flatten()
        order_X = experts_X.argsort(stable=True)
        counts = experts_X.bincount(minlength=len(self.packed["down"])).tolist()
        chunks = x_TE[order_X // num_chosen].split(counts)
        by_expert_XE = torch.cat([self._run(expert, chunk) for expert, chunk in enumerate(chunks) if len(chunk)])
        by_token_XE = torch.empty_like(by_expert_XE)
        by_token_XE[order_X] = by_expert_XE
        out_TCE = by_token_XE.view(num_tokens, num_chosen, -1).float() * weights_TC[:, :, None]
        return out_TCE.sum(1).to(x_TE.dtype)

    def _run(self, expert: int, x_XE: Tensor) -> Tensor:
        hidden_XI = act_mul(linear(x_XE, self.packed["gate_up"][expert]), kind=self.activation)
        return linear(hidden_XI, self.packed["down"][expert])


class MoeMlp(nn.Module):
    """A router and its experts."""

    def __init__(self, router: FusedLinear, experts: Experts, *, route: Route, num_chosen: int) -> None:
        """num_chosen: experts a token goes through."""
        super().__init__()
        self.router = router
        self.experts = experts
        self.route = route
        self.num_chosen = num_chosen

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        weights_TC, experts_TC = self.route(self.router(x_TE), self.num_chosen)
        return self.experts(x_TE, weights_TC, experts_TC)
