"""What a model shows the engine: its layer table, what its layers keep, and how it is run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_engine.groups.spec import AttentionSpec, ChunkedLocalSpec, FullAttentionSpec, SlidingWindowSpec
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.models.layers.rope import Rope
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Weight

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"


@dataclass(frozen=True)
class LayerInfo:
    """One row of the layer table."""

    index: int
    kind: str
    """"full_attention", "sliding_attention" or "chunked_attention"."""
    num_heads: int
    num_kv_heads: int
    head_size: int
    rope: Rope
    window: int | None = None
    """Tokens that a query of a sliding layer sees, itself counted."""
    chunk: int | None = None
    """Tokens in a chunk of a chunked layer."""

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope.theta

    @property
    def rope_scaling(self) -> str:
        """How the rotary frequencies are scaled, in a word or two."""
        return str(self.rope)

    def cache_spec(self, *, block_size: int, element_bytes: int) -> AttentionSpec:
        """What the layer keeps between steps."""
        size = (self.num_kv_heads, self.head_size, element_bytes, block_size)
        if self.kind == SLIDING:
            return SlidingWindowSpec(*size, window=self.window or 0)
        if self.kind == CHUNKED:
            return ChunkedLocalSpec(*size, chunk=self.chunk or 0)
        return FullAttentionSpec(*size)


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model from its config alone."""

    architecture: str
    """The config's model_type."""
    layers: tuple[LayerInfo, ...]
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_parameters: int
    """Elements of all weights; a tied head counts once."""

    def cache_specs(self, *, block_size: int, element_bytes: int) -> dict[int, AttentionSpec]:
        """What each layer keeps between steps, by layer index."""
        return {
            layer.index: layer.cache_spec(block_size=block_size, element_bytes=element_bytes) for layer in self.layers
        }


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, in blocks."""

    k_BKPD: Tensor
    v_BKPD: Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, packed: the requests' tokens one after the other, without padding."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, each token's position in its request."""
    metas: tuple[AttentionMeta, ...]
    """By layer index; layers of one group share the object."""
    caches: tuple[LayerCache, ...]
    """By layer index."""


class Model(nn.Module):
    """A causal language model whose keys and values lie in caches that the caller owns."""

    info: ModelInfo
    dtype: torch.dtype

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys and values into the caches: hidden_TE after the final norm."""

    @abstractmethod
    def logits(self, hidden_XE: Tensor) -> Tensor:
        """Score the vocabulary for any rows of forward's result: float32 [X, V]."""

    @abstractmethod
    def check_layers(self) -> None:
        """Assert that every layer is what the layer table says."""

    def weights(self) -> Iterator[tuple[Weight, Callable[[Weight, Tensor], None]]]:
        """Every weight, and where it is taken once it is filled."""
        for module in self.modules():
            if isinstance(module, WeightModule):
                for weight in module.weights:
                    yield weight, module.take_weight
