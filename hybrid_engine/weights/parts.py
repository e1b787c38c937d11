"""How a model says which checkpoint tensors its weights are made of."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint."""

    name: str
    """Its name in Hugging Face's model class."""
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Weight:
    """One tensor of the model: checkpoint tensors stacked along their first dimension."""

    attribute: str
    """Under which name the module takes it."""
    parts: tuple[Part, ...]
    is_float32: bool = False
    """Kept in float32 whatever the model's dtype: small and precious."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the stack."""
        return (sum(part.shape[0] for part in self.parts), *self.parts[0].shape[1:])

    @property
    def num_elements(self) -> int:
        """Elements of the stack."""
        return math.prod(self.shape)
