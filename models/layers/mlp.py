"""The gated MLP."""

from __future__ import annotations

from torch import Tensor, nn

from hybrid_engine.models.layers.linear import FusedLinear


class GatedMlp(nn.Module):
    """down(act(gate(x)) * up(x)), gate and up in one product."""

    def __init__(
        self,
        name: str,
        *,
        hidden_size: int,
        intermediate_size: int,
        activation: str,
        has_bias: bool,
        gate_up: tuple[str, ...] = ("gate_proj", "up_proj"),
        down: str = "down_proj",
    ) -> None:
        """gate_up, down: the checkpoint's names; gate and up may be one tensor."""
        super().__init__()
        self.activation = activation
        inner = {f"{name}.{part}": 2 * intermediate_size // len(gate_up) for part in gate_up}
        self.gate_up = FusedLinear(hidden_size, inner, has_bias=has_bias)
        self.down = FusedLinear(intermediate_size, {f"{name}.{down}": hidden_size}, has_bias=has_bias)

    def forward(self, x_TE: Tensor) -> Tensor:
        """[T, E]."""
        return self.down(self.gate_up.gated(x_TE, kind=self.activation))
