"""A module whose weights come from a checkpoint."""

from __future__ import annotations

from torch import Tensor, nn

from hybrid_engine.weights.parts import Weight


class WeightModule(nn.Module):
    """A module that gets its weights once, whole, from a loader."""

    weights: tuple[Weight, ...]

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; the tensor is the module's from now on."""
        setattr(self, weight.attribute, tensor)
