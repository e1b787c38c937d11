"""How a model says which checkpoint tensors its weights are made of."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

Change = Callable[[Tensor], Tensor]
"""From a tensor as a checkpoint has it to what the model keeps; a view where that is enough."""


@dataclass(frozen=True)
class Part:
    """One tensor of the checkpoint."""

    name: str
    """Its name in Hugging Face's model class."""
    shape: tuple[int, ...]
    """What the model keeps."""
    stored_shape: tuple[int, ...] | None = None
    """What the checkpoint holds, where it differs."""
    change: Change | None = None
    """From the one to the other; None: nothing is to be done."""

    @classmethod
    def transposed(cls, name: str, shape: tuple[int, ...], change: Change | None = None) -> Part:
        """A stack of matrices whose rows and columns the checkpoint has the other way round.

        change: what is done once they are turned.
        """
        *stack, rows, columns = shape
        turn = _transpose if change is None else lambda tensor: change(_transpose(tensor))
        return cls(name, shape, (*stack, columns, rows), turn)


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


def undo_interleaving(weight_N: Tensor, num_heads: int) -> Tensor:
    """Bring the rows of each head from pairs (0, D/2, 1, D/2 + 1, ...), which turn together, to halves.

    weight_N: a weight or bias whose first dimension is num_heads * D.
    """
    pairs = weight_N.unflatten(0, (num_heads, -1, 2))
    return pairs.transpose(1, 2).flatten(0, 2)


def _transpose(tensor: Tensor) -> Tensor:
    return tensor.transpose(-1, -2)
