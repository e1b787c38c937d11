"""Muon: momentum whose matrix is made orthogonal before it is taken as a step.

Method: https://kellerjordan.github.io/posts/muon/. Here matrices of equal shape are done together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the method's page: they bring all singular values near 1 in few rounds."""
ROUNDS = 5


class Muon(torch.optim.Optimizer):
    """For matrices only."""

    def __init__(
        self, matrices: Iterable[nn.Parameter], *, lr: float, momentum: float = 0.95, weight_decay: float = 0.0
    ) -> None:
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step along the gradients."""
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for matrix in group["params"]:
                by_shape[matrix.shape].append(matrix)
            for (num_rows, num_columns), matrices in by_shape.items():
                steps = orthogonal(torch.stack([self._nesterov(matrix, group["momentum"]) for matrix in matrices]))
                rate = group["lr"] * max(1.0, num_rows / num_columns) ** 0.5
                torch._foreach_mul_(matrices, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(matrices, list(steps.unbind()), alpha=-rate)

    def _nesterov(self, matrix: nn.Parameter, momentum: float) -> Tensor:
        assert matrix.grad is not None, "a matrix has no gradient"
        kept = self.state[matrix].setdefault("momentum", torch.zeros_like(matrix))
        kept.lerp_(matrix.grad, 1 - momentum)
        return matrix.grad.lerp(kept, momentum)


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest orthogonal matrix to each, roughly, by Newton and Schulz's iteration. [any, rows, columns]"""
    first, second, third = COEFFICIENTS
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.transpose(1, 2) if is_tall else matrices
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(ROUNDS):
        square = x @ x.transpose(1, 2)
        x = first * x + (second * square + third * square @ square) @ x
    return x.transpose(1, 2) if is_tall else x
