"""A module whose weights come from a checkpoint."""

from __future__ import annotations

from torch import Tensor, nn

from hybrid_engine.weights.parts import Part, Weight


class WeightModule(nn.Module):
    """A module that gets its weights once, whole, from a loader."""

    weights: tuple[Weight, ...]
    quantization: str | None = None
    """How linear weights are kept, one of kernels.linear.QUANTIZATIONS; None: in the dtype they are taken in."""
    is_exact: bool = False
    """Whether a row must give the same bits whatever rows are beside it."""

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Keep a weight; the tensor is the module's from now on."""
        setattr(self, weight.attribute, tensor)


class Vector(WeightModule):
    """A few numbers in float32: sinks, corrections, scales."""

    weight_E: Tensor

    def __init__(self, name: str, *shape: int) -> None:
        """name: the tensor's whole name in the checkpoint."""
        super().__init__()
        self.weights = (Weight("weight_E", (Part(name, shape),), is_float32=True),)
