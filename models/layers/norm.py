"""Weights of norms. RMSNorms themselves are fused with what surrounds them and called where they stand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight


class Norm(WeightModule):
    """The weight of an RMSNorm, in float32."""

    weight_E: Tensor

    def __init__(self, name: str, size: int) -> None:
        super().__init__()
        self.weights = (Weight("weight_E", (Part(f"{name}.weight", (size,)),), is_float32=True),)


class PlainNorm(nn.Module):
    """An RMSNorm without a weight: what stands in its place."""

    weight_E: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("weight_E", torch.ones(size), persistent=False)


def layer_norm(x_TE: Tensor, weight_E: Tensor, *, eps: float) -> Tensor:
    """(x - mean) / deviation * weight over the last dimension, in float32, cast to x's dtype at the end."""
    return F.layer_norm(x_TE.float(), weight_E.shape, weight_E, None, eps).to(x_TE.dtype)
