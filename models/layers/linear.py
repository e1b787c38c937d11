"""Linear layers: several of a checkpoint's projections as one product."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from hybrid_engine.kernels.linear import PackedLinear, Screen, can_screen, linear, linear_gated
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Change, Part, Weight

LEAST_SCREENED_BYTES = 64 << 20
"""Of a head: smaller ones stay in a cache of the processor, or are read so fast that a screen gives little."""


class FusedLinear(WeightModule):
    """Projections of the same input, computed in one product; one projection is a plain linear layer."""

    packed: PackedLinear
    bias_N: Tensor | None

    def __init__(
        self,
        num_inputs: int,
        num_outputs: Mapping[str, int],
        *,
        has_bias: bool = False,
        changes: Mapping[str, Change] | None = None,
        is_precious: bool = False,
    ) -> None:
        """num_outputs: columns of each projection by its name in the checkpoint, in the order of the output.

        changes: what is done to the rows of weight and bias of a projection, by its name.
        is_precious: never quantised, being small, and deciding much: which expert computes, how fast a state decays.
        """
        super().__init__()
        self.is_precious = is_precious
        self.num_inputs = num_inputs
        self.num_outputs = sum(num_outputs.values())
        self.bias_N = None
        sizes, changes = num_outputs.items(), changes or {}
        weights = tuple(Part(f"{name}.weight", (n, num_inputs), change=changes.get(name)) for name, n in sizes)
        biases = tuple(Part(f"{name}.bias", (n,), change=changes.get(name)) for name, n in sizes)
        bias = (Weight("bias_N", biases, is_float32=True),) if has_bias else ()
        self.weights = (Weight("packed", weights), *bias)

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Pack the weight, keep the bias."""
        if weight.attribute == "packed":
            self.packed = PackedLinear.pack(
                tensor, None if self.is_precious else self.quantization, is_exact=self.is_exact
            )
        else:
            self.bias_N = tensor

    def forward(self, x_TK: Tensor) -> Tensor:
        """Project: [T, N]."""
        return linear(x_TK, self.packed, self.bias_N)

    def gated(self, x_TK: Tensor, *, kind: str) -> Tensor:
        """act(gate) * up, where the projections are gate and up: [T, N / 2]. kind: as act_mul()'s."""
        return linear_gated(x_TK, self.packed, self.bias_N, kind=kind)


class Embedding(WeightModule):
    """A table of vectors, one a token; it scores hidden states too where the head is tied."""

    packed: PackedLinear

    def __init__(
        self, name: str, *, vocab_size: int, hidden_size: int, scale: float | None = None, is_head: bool = False
    ) -> None:
        """scale: what the looked-up vectors are multiplied with, rounded to their dtype before.

        is_head: whether it scores hidden states; a table that doesn't is never quantised, for few rows of it are read.
        """
        super().__init__()
        self.is_head = is_head
        self.scale = scale
        self.screen: Screen | None = None
        """Finds the highest score without all the others; None where nobody made it, or it wouldn't pay."""
        self.weights = (Weight("packed", (Part(f"{name}.weight", (vocab_size, hidden_size)),)),)

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Pack the table."""
        self.packed = PackedLinear.pack(tensor, self.quantization if self.is_head else None, is_exact=self.is_exact)
        if self.scale is not None:  # Gemma was trained with the factor in its own dtype
            self.scale = torch.tensor(self.scale).to(tensor.dtype).item()

    def forward(self, token_ids_T: Tensor) -> Tensor:
        """Look tokens up: [T, E]."""
        rows_TE = self.packed.rows(token_ids_T)
        return rows_TE if self.scale is None else rows_TE * self.scale

    def make_screen(self) -> None:
        """Make a screen of a table that is read from memory whenever it scores, where it can be made."""
        is_large = self.packed.num_bytes >= LEAST_SCREENED_BYTES
        if self.screen is None and is_large and can_screen(self.packed):
            screen = Screen(self.packed)
            self.screen = screen if screen.is_usable else None

    def scores(self, hidden_XE: Tensor, *, divisor: float | None = None, softcap: float | None = None) -> Tensor:
        """Score the vocabulary: float32 [X, V], divided, then softcap * tanh(scores / softcap), where given."""
        scores_XV = linear(hidden_XE, self.packed, out_dtype=torch.float32)
        if divisor is not None:
            scores_XV.div_(divisor)
        return scores_XV if softcap is None else scores_XV.div_(softcap).tanh_().mul_(softcap)
