"""Experts, tokens and who chose whom, with the reference beside them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from hybrid_engine.kernels.linear.fp8 import round_to_fp8
from hybrid_engine.kernels.moe import Activation, PackedExperts, moe, reference

# Sums of up to some hundred products of unit normals twice over. float32: in another order; bfloat16: what goes into
# the second product is rounded, and so is each expert's output.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-6, "atol": 6e-2}}


@dataclass
class Problem:
    """A call of the op."""

    num_tokens: int = 5
    num_experts: int = 4
    num_chosen: int = 2
    width: int = 48
    inner: int = 40
    dtype: torch.dtype = torch.float32
    activation: Activation = field(default_factory=lambda: Activation("silu"))
    has_biases: bool = False
    weighs_inputs: bool = False
    quantization: str | None = None
    experts: list[list[int]] | None = None
    x_TE: Tensor = field(init=False)

    def __post_init__(self) -> None:
        first_columns = self.inner * (2 if self.activation.is_gated else 1)
        shapes = ((self.num_experts, first_columns, self.width), (self.num_experts, self.width, self.inner))
        self.gate_up, self.down = ((torch.randn(shape) * shape[2] ** -0.5).to(self.dtype) for shape in shapes)
        self.x_TE = torch.randn(self.num_tokens, self.width).to(self.dtype)
        scores_TX = torch.rand(self.num_tokens, self.num_experts)
        self.weights_TC, self.experts_TC = scores_TX.topk(self.num_chosen, dim=1)
        if self.experts is not None:
            self.experts_TC = torch.tensor(self.experts)
        self.options = {"activation": self.activation, "weighs_inputs": self.weighs_inputs}
        for name, shape in zip(("gate_up_bias_XN", "down_bias_XE"), shapes, strict=True):
            self.options[name] = torch.randn(shape[:2]) if self.has_biases else None

    def run(self) -> Tensor:
        """What the op gives."""
        matrices = {"gate_up": self.gate_up, "down": self.down}
        packed = {name: PackedExperts.pack(stack, self.quantization) for name, stack in matrices.items()}
        return moe(self.x_TE, self.weights_TC, self.experts_TC, **packed, **self.options)

    def check(self) -> None:
        """Compare with the reference."""
        matrices = {"gate_up": self.gate_up, "down": self.down}
        if self.quantization == "fp8":
            rounded = {name: round_to_fp8(stack) for name, stack in matrices.items()}
            matrices = {name: data.float() * scales[..., None] for name, (data, scales) in rounded.items()}
        wanted = reference.moe(self.x_TE, self.weights_TC, self.experts_TC, **matrices, **self.options)
        got = self.run()
        assert got.dtype == self.dtype
        torch.testing.assert_close(got, wanted, **TOLERANCE[self.dtype])


@pytest.fixture
def problem() -> type[Problem]:
    return Problem
