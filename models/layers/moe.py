"""A mixture of experts: each token goes through a few gated MLPs that a router chooses for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act, act_mul
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.weight import Vector, WeightModule
from hybrid_engine.weights.parts import Part, Weight

Route = Callable[[Tensor, int], tuple[Tensor, Tensor]]
"""From scores [T, X] and a count: weights (float32) and indices of each token's experts, both [T, count]."""


def softmax_then_top(scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts with their shares among all, which then don't add up to 1 (Jamba)."""
    weights_TC, experts_TC = scores_TX.float().softmax(1).topk(num_chosen, dim=1)
    return weights_TC, experts_TC


def top_then_softmax(scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The likeliest experts with their shares among themselves (Granite; Qwen 3 with its weights made to add up)."""
    top_TC, experts_TC = scores_TX.float().topk(num_chosen, dim=1)
    return top_TC.softmax(1), experts_TC


def top_then_sigmoid(scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
    """The highest scores, each through a sigmoid by itself (Llama 4)."""
    top_TC, experts_TC = scores_TX.float().topk(num_chosen, dim=1)
    return act(top_TC, kind="sigmoid"), experts_TC


@dataclass(frozen=True)
class GroupedSigmoid:
    """Scores through a sigmoid; a learned correction decides with them who is chosen, not how much each one counts.

    Source: DeepSeek-V3 report (arXiv 2412.19437), 2.1.2, with the groups of DeepSeek-V2.
    """

    correction: Vector | None = None
    """[X], added to the scores for the choice alone."""
    num_groups: int = 1
    """Experts stand in groups of equal size …"""
    num_kept_groups: int = 1
    """… of which only those with the highest sum of two scores are chosen from."""
    is_normed: bool = True
    """Whether the weights are made to add up to 1 …"""
    scale: float = 1.0
    """… before they are multiplied with this."""
    norm_eps: float = 1e-20

    def __call__(self, scores_TX: Tensor, num_chosen: int) -> tuple[Tensor, Tensor]:
        """Choose."""
        shares_TX = act(scores_TX.float(), kind="sigmoid")
        wanted_TX = shares_TX if self.correction is None else shares_TX + self.correction.weight_E
        if self.num_groups > 1:
            wanted_TX = self._within_best_groups(wanted_TX)
        experts_TC = wanted_TX.topk(num_chosen, dim=1).indices
        weights_TC = shares_TX.gather(1, experts_TC)
        if self.is_normed:
            weights_TC = weights_TC / (weights_TC.sum(1, keepdim=True) + self.norm_eps)
        return weights_TC * self.scale, experts_TC

    def _within_best_groups(self, wanted_TX: Tensor) -> Tensor:
        grouped = wanted_TX.unflatten(1, (self.num_groups, -1))
        best = grouped.topk(min(2, grouped.shape[2]), dim=2).values.sum(2).topk(self.num_kept_groups, dim=1).indices
        is_kept = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=wanted_TX.device).scatter_(1, best, True)
        return grouped.masked_fill(~is_kept[:, :, None], -torch.inf).flatten(1)


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
        gate_up_bias: Part | None = None,
        down_bias: Part | None = None,
        weighs_inputs: bool = False,
    ) -> None:
        """gate_up, down: the checkpoint's tensors, which together hold the experts one after the other.

        gate_up_bias, down_bias: [X, 2I] and [X, E], where there are any.
        weighs_inputs: the weights multiply what goes into the experts, not what comes out (Llama 4).
        """
        super().__init__()
        self.activation = activation
        self.weighs_inputs = weighs_inputs
        self.shapes = {
            "gate_up": (num_experts, 2 * intermediate_size, hidden_size),
            "down": (num_experts, hidden_size, intermediate_size),
        }
        self.packed: dict[str, list[PackedLinear]] = {}
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
        self.weights = (
            Weight("gate_up", gate_up),
            Weight("down", down),
            *(Weight(name, (part,), is_float32=True) for name, part in biases.items() if part is not None),
        )

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Pack each expert by itself, keep biases."""
        if weight.attribute not in self.shapes:
            super().take_weight(weight, tensor)
            return
        matrices_XNK = tensor.view(self.shapes[weight.attribute])
        self.packed[weight.attribute] = [
            PackedLinear.pack(matrix_NK, self.quantization, is_exact=self.is_exact) for matrix_NK in matrices_XNK
        ]

    def forward(self, x_TE: Tensor, weights_TC: Tensor, experts_TC: Tensor) -> Tensor:
        """[T, E], C experts a token. A token's result doesn't depend on what else is in the batch."""
        num_tokens, num_chosen = experts_TC.shape
        experts_X = experts_TC.flatten()
        order_X = experts_X.argsort(stable=True)
        counts = experts_X.bincount(minlength=len(self.packed["down"])).tolist()
        x_XE = x_TE[order_X // num_chosen]
        if self.weighs_inputs:
            x_XE = (x_XE * weights_TC.flatten()[order_X, None]).to(x_TE.dtype)
            weights_TC = torch.ones_like(weights_TC)
        by_expert_XE = torch.cat(
            [self._run(expert, chunk) for expert, chunk in enumerate(x_XE.split(counts)) if len(chunk)]
        )
        by_token_XE = torch.empty_like(by_expert_XE)
        by_token_XE[order_X] = by_expert_XE
        out_TCE = by_token_XE.view(num_tokens, num_chosen, -1).float() * weights_TC[:, :, None]
        total_TE = out_TCE[:, 0]
        for choice in range(1, num_chosen):  # in this order for every token: sum() takes one that suits the shape
            total_TE = total_TE + out_TCE[:, choice]
        return total_TE.to(x_TE.dtype)

    def activate(self, gate_up_XC: Tensor) -> Tensor:
        """act(gate) * up: [X, I]."""
        return act_mul(gate_up_XC, kind=self.activation)

    def _run(self, expert: int, x_XE: Tensor) -> Tensor:
        gate_up_bias = None if self.gate_up_bias is None else self.gate_up_bias[expert]
        down_bias = None if self.down_bias is None else self.down_bias[expert]
        hidden_XI = self.activate(linear(x_XE, self.packed["gate_up"][expert], gate_up_bias))
        return linear(hidden_XI, self.packed["down"][expert], down_bias)


class MoeMlp(nn.Module):
    """A router and its experts, and maybe an MLP beside them that every token goes through."""

    def __init__(
        self,
        router: FusedLinear,
        experts: Experts,
        *,
        route: Route,
        num_chosen: int,
        shared: nn.Module | None = None,
        shared_gate: FusedLinear | None = None,
    ) -> None:
        """num_chosen: experts a token goes through.

        shared: the MLP beside them. shared_gate: to one number, whose sigmoid the shared MLP's output is weighed with.
        """
        super().__init__()
        self.router = router
        self.experts = experts
        self.route = route
        self.correction = getattr(route, "correction", None)  # so that torch and the loader know its weight
        self.num_chosen = num_chosen
        self.shared = shared
        self.shared_gate = shared_gate

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        weights_TC, experts_TC = self.route(self.router(x_TE), self.num_chosen)
        out_TE = self.experts(x_TE, weights_TC, experts_TC)
        if self.shared is None:
            return out_TE
        shared_TE = self.shared(x_TE)
        if self.shared_gate is not None:
            shared_TE = shared_TE * act(self.shared_gate(x_TE), kind="sigmoid")
        return out_TE + shared_TE


def separate_experts(
    name: str,
    num_experts: int,
    *,
    hidden_size: int,
    intermediate_size: int,
    gate_up: tuple[str, str] = ("gate_proj", "up_proj"),
    down: str = "down_proj",
) -> dict:
    """Parts of experts that the checkpoint keeps one by one, as Experts takes them: gate_up and down.

    name: of the list of experts. gate_up, down: of an expert's projections.
    """
    each = [f"{name}.{expert}" for expert in range(num_experts)]
    inner = (intermediate_size, hidden_size)
    return {
        "gate_up": tuple(Part(f"{one}.{half}.weight", inner) for one in each for half in gate_up),
        "down": tuple(Part(f"{one}.{down}.weight", inner[::-1]) for one in each),
    }
