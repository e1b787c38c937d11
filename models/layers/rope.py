"""Rotary position embedding: frequencies with their scalings, and the tables of one step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.rope import rope_table

PROPORTIONAL, LONGROPE = "proportional", "longrope"
SCALINGS = ("default", "linear", "llama3", "yarn", PROPORTIONAL, LONGROPE, "divisors")
"""Scalings known here. "proportional": the frequencies of the whole head, of which only the first turn. "divisors": one
for each frequency, as a GGUF file gives Llama 3.1's; "longrope" too, with a magnitude."""


@dataclass(frozen=True)
class Rope:
    """How a layer turns its queries and keys."""

    theta: float
    """Base of the frequencies."""
    rotary_size: int
    """Elements of a head that turn; the others stay."""
    scaling: str = "default"
    """One of SCALINGS."""
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    """Context that the model was pretrained with (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    is_truncated: bool = True
    """yarn: whether the ramp begins and ends at whole dimensions."""
    magnitude: float = 1.0
    """yarn, longrope: what cosines and sines are multiplied with."""
    divisors: tuple[float, ...] = ()
    num_turning: int = 0
    """proportional: elements of a head that really turn; the others of rotary_size have frequency 0."""

    def __str__(self) -> str:
        if not self.rotary_size:
            return "none"
        if self.scaling in ("default", "divisors"):
            return self.scaling
        if self.scaling == PROPORTIONAL:
            return f"{self.num_turning} of {self.rotary_size}"
        return f"{self.scaling} x{self.factor:g}"

    def frequencies(self) -> Tensor:
        """Radians a position: float32 [rotary_size / 2]."""
        exponents = torch.arange(0, self.rotary_size, 2, dtype=torch.int64).float() / self.rotary_size
        plain = 1.0 / self.theta**exponents
        if self.scaling == "linear":
            return plain / self.factor
        if self.scaling == PROPORTIONAL:
            return plain / self.factor * (torch.arange(len(plain)) < self.num_turning // 2)
        if self.scaling == "llama3":
            return self._llama3(plain)
        if self.scaling == "yarn":
            return self._yarn(plain)
        return plain / torch.tensor(self.divisors) if self.divisors else plain

    def _llama3(self, plain: Tensor) -> Tensor:
        """Divide the long waves by the factor, keep the short ones, blend between (Llama 3.1)."""
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        blend = blend.clamp(0, 1)
        return (1 - blend) * plain / self.factor + blend * plain

    def _yarn(self, plain: Tensor) -> Tensor:
        """Divide by the factor along a ramp over the dimensions (YaRN, https://arxiv.org/abs/2309.00071, 3.2)."""
        low, high = self._turning_dim(self.beta_fast), self._turning_dim(self.beta_slow)
        if self.is_truncated:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, self.rotary_size - 1)
        ramp = (torch.arange(self.rotary_size // 2) - low) / (high - low or 0.001)
        ramp = ramp.clamp(0, 1)
        return plain / self.factor * ramp + plain * (1 - ramp)

    def _turning_dim(self, turns: float) -> float:
        """The dimension whose wave turns this often within the original context."""
        wave = self.original_max_position_embeddings / (turns * 2 * math.pi)
        return self.rotary_size * math.log(wave) / (2 * math.log(self.theta))


NO_ROPE = Rope(theta=1.0, rotary_size=0)
"""Of layers that know positions in another way or not at all: nothing of a head turns."""


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """The factor that YaRN puts on cosines and sines."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


class RopeTables(nn.Module):
    """Cosines and sines of a step's positions, once for each distinct rope of a model."""

    def __init__(self, ropes: Sequence[Rope]) -> None:
        super().__init__()
        self.ropes = tuple(ropes)
        self.frequencies = tuple(rope.frequencies() for rope in ropes)

    def forward(self, positions_T: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
        """(cos_TD, sin_TD) in float32 for each rope, both halves filled."""
        if self.frequencies and self.frequencies[0].device != positions_T.device:
            self.frequencies = tuple(frequencies.to(positions_T.device) for frequencies in self.frequencies)
        return tuple(
            rope_table(positions_T, frequencies_F, magnitude=rope.magnitude)
            for rope, frequencies_F in zip(self.ropes, self.frequencies, strict=True)
        )
