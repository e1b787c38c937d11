"""What a model shows the engine: its layer table, what its layers keep, and how it is run."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hybrid_engine.groups.spec import ChunkedLocalSpec, FullAttentionSpec, LayerSpec, MambaSpec, SlidingWindowSpec
from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.layers.rope import NO_ROPE, Rope
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Weight

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
MAMBA, MAMBA2, SHORT_CONV = "mamba", "mamba2", "conv"
MLP = "mlp"
"""A layer that mixes no tokens and so keeps nothing."""
DELTA_NET, LIGHTNING, RG_LRU = "delta_net", "lightning", "rg_lru"
RECURRENT = (MAMBA, MAMBA2, SHORT_CONV, DELTA_NET, LIGHTNING, RG_LRU)
"""Kinds of layers that keep one state, whatever the number of tokens."""


@dataclass(frozen=True)
class MambaInfo:
    """What the mixer of a Mamba-1 or Mamba-2 layer is made of."""

    inner_size: int
    state_size: int
    conv_width: int
    """Inputs that the convolution sees, the token's own counted."""
    num_heads: int = 0
    """Mamba-2 only; a head has inner_size / num_heads channels."""
    num_groups: int = 1
    """Mamba-2 only: heads of a group share B and C, and the gated norm is over a group's channels."""
    has_gated_norm: bool = True
    """Mamba-2 only: without a norm the gate alone follows the scan (Falcon-H1)."""
    is_normed_before_gate: bool = False
    """Mamba-2 only: whether the gate multiplies what is normed, or is normed with it."""
    gated_norm_eps: float | None = None
    """Mamba-2 only: None: that of the other norms."""
    column_scales: tuple[float, ...] = ()
    """Mamba-2 only: what gate, scan's input, B, C and time steps are multiplied with once projected (Falcon-H1)."""
    dt_rank: int = 0
    """Mamba-1 only: the width through which the time steps are projected."""
    num_slices: int | None = None
    """Mamba-1 only: the channels' equal slices, each with time steps, B and C of its own (Zamba); None: one whole."""
    dt_limit: tuple[float, float] = (0.0, math.inf)
    """Mamba-2 only: what time steps are clamped to."""
    has_conv_bias: bool = True
    has_bias: bool = False
    """Whether the projections into and out of the layer have one."""
    has_output_bias: bool | None = None
    """Whether the projection out of the layer has one, where it isn't as the other."""
    has_inner_norms: bool = False
    """Whether time steps, B and C are normed (Jamba) …"""
    has_inner_norm_weights: bool = True
    """… and then multiplied with weights (not so in Falcon-Mamba)."""
    inner_norm_eps: float | None = None
    """None: that of the other norms."""

    @property
    def head_size(self) -> int:
        """Channels of a Mamba-2 head."""
        return self.inner_size // self.num_heads

    @property
    def num_conv_channels(self) -> int:
        """Channels of the convolution: Mamba-2's covers B and C too."""
        return self.inner_size + (2 * self.num_groups * self.state_size if self.num_heads else 0)

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """The recurrent state."""
        if self.num_heads:
            return (self.num_heads, self.head_size, self.state_size)
        return (self.inner_size, self.state_size)


@dataclass(frozen=True)
class ShortConvInfo:
    """What a layer that only convolves is made of (Lfm)."""

    num_conv_channels: int
    conv_width: int
    """Inputs that the convolution sees, the token's own counted."""
    has_bias: bool = False
    """Whether the convolution and the projections have one."""

    @property
    def has_conv_bias(self) -> bool:
        """Whether the convolution has one."""
        return self.has_bias

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """No recurrent state: the inputs of the convolution are all that is kept."""
        return (0,)


@dataclass(frozen=True)
class DeltaNetInfo:
    """What a gated delta net is made of: Gated DeltaNet, Kimi Delta Attention."""

    num_heads: int
    num_groups: int
    """Heads of a group share queries and keys."""
    key_size: int
    value_size: int
    conv_width: int
    """Inputs that the convolution sees, the token's own counted."""
    has_row_decays: bool = False
    """Whether each row of a state has a decay of its own (Kimi), or all of a head the same."""
    beta_scale: float = 1.0
    """2: a token may turn what the state holds at its key into the opposite (Olmo)."""
    norm_eps: float | None = None
    """Of the norm behind the rule; None: that of the other norms."""
    has_conv_bias: bool = False

    @property
    def key_columns(self) -> int:
        """Of all queries, or of all keys."""
        return self.num_groups * self.key_size

    @property
    def value_columns(self) -> int:
        """Of all values."""
        return self.num_heads * self.value_size

    @property
    def num_conv_channels(self) -> int:
        """Queries, keys and values are convolved."""
        return 2 * self.key_columns + self.value_columns

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """The recurrent state."""
        return (self.num_heads, self.key_size, self.value_size)


@dataclass(frozen=True)
class LightningInfo:
    """What lightning attention is made of (MiniMax)."""

    num_heads: int
    head_size: int
    num_conv_channels: int = 0
    conv_width: int = 1
    """Nothing is convolved."""
    has_conv_bias: bool = False

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """The recurrent state."""
        return (self.num_heads, self.head_size, self.head_size)


@dataclass(frozen=True)
class LatentInfo:
    """What multi-head latent attention is made of (DeepSeek-V2).

    A token's keys and values of all heads are projected from one latent vector, and this is what is kept: its row of
    the layer table has one kv head, whose key is the latent and behind it what the heads share, and whose value is the
    latent.
    """

    latent_size: int
    shared_size: int
    """Elements of a key that all heads share (those that turn, where anything does)."""
    own_size: int
    """Elements of a key that a head has to itself."""
    value_size: int
    """Of a head, once projected from the latent."""
    query_rank: int | None = None
    """Width through which queries are projected; None: directly."""


@dataclass(frozen=True)
class RgLruInfo:
    """What a real-gated linear recurrent unit is made of (RecurrentGemma)."""

    num_conv_channels: int
    """All of its channels are convolved."""
    conv_width: int
    """Inputs that the convolution sees, the token's own counted."""
    num_blocks: int
    """Equal slices of the channels, whose gates see their own slice alone."""
    has_conv_bias: bool = True

    @property
    def ssm_shape(self) -> tuple[int, ...]:
        """The recurrent state: a number a channel."""
        return (self.num_conv_channels, 1)


@dataclass(frozen=True)
class LayerInfo:
    """One row of the layer table: what mixes a layer's tokens. A layer that does it in two ways has two rows."""

    index: int
    """The layer's; rows of one layer share it and stand next to each other."""
    kind: str
    """"full_attention", "sliding_attention", "chunked_attention", "mlp" or one of RECURRENT."""
    num_heads: int = 0
    num_kv_heads: int = 0
    head_size: int = 0
    rope: Rope = NO_ROPE
    window: int | None = None
    """Tokens that a query of a sliding layer sees, itself counted."""
    chunk: int | None = None
    """Tokens in a chunk of a chunked layer."""
    mamba: MambaInfo | None = None
    """What a Mamba-1 or Mamba-2 layer is made of."""
    short_conv: ShortConvInfo | None = None
    """What a layer that only convolves is made of."""
    delta_net: DeltaNetInfo | None = None
    """What a gated delta net is made of."""
    lightning: LightningInfo | None = None
    """What lightning attention is made of."""
    rg_lru: RgLruInfo | None = None
    """What a real-gated linear recurrent unit is made of."""
    num_experts: int = 0
    """Experts of the layer's MLP; 0: a dense one or none."""
    v_head_size: int | None = None
    """Size of a value's heads where it differs from that of queries and keys; 0: values are parts of the keys."""
    latent: LatentInfo | None = None
    """What multi-head latent attention is made of."""
    has_sinks: bool = False
    """Whether each head has a score that takes its share of the softmax and gives nothing."""
    reads_layer: int | None = None
    """The earlier layer whose keys and values this one reads; it then keeps none itself."""

    @property
    def recurrent(self) -> MambaInfo | ShortConvInfo | DeltaNetInfo | LightningInfo | RgLruInfo | None:
        """What a layer that keeps one state is made of; None for attention."""
        return self.mamba or self.short_conv or self.delta_net or self.lightning or self.rg_lru

    @property
    def has_cache(self) -> bool:
        """Whether anything is kept between steps."""
        return self.kind != MLP and self.reads_layer is None

    @property
    def rope_theta(self) -> float:
        """Base of the rotary frequencies."""
        return self.rope.theta

    @property
    def rope_scaling(self) -> str:
        """How the rotary frequencies are scaled, in a word or two."""
        return str(self.rope)

    @property
    def value_size(self) -> int:
        """Size of a value's heads."""
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def attended_value_size(self) -> int:
        """Size of what attention weighs: a value's heads, or the latent part of a key."""
        return self.value_size if self.latent is None else self.latent.latent_size

    def cache_spec(self, *, block_size: int, element_bytes: int) -> LayerSpec:
        """What the row keeps between steps; it has_cache."""
        assert self.has_cache, self
        if self.recurrent is not None:
            return MambaSpec(
                conv_shape=(self.recurrent.num_conv_channels, self.recurrent.conv_width - 1),
                ssm_shape=self.recurrent.ssm_shape,
                conv_element_bytes=element_bytes,
            )
        size = (self.num_kv_heads, self.head_size, element_bytes, block_size, self.v_head_size)
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
    """The layer table, first layer first."""
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    num_parameters: int
    """Elements of all weights; a tied head counts once."""

    @property
    def num_layers(self) -> int:
        """Layers; the table has as many rows or more."""
        return len({layer.index for layer in self.layers})

    @property
    def cached_layers(self) -> tuple[LayerInfo, ...]:
        """The rows that keep anything. What bookkeeping and runner call a layer's index is a place in here."""
        return tuple(layer for layer in self.layers if layer.has_cache)

    def cache_specs(self, *, block_size: int, element_bytes: int) -> dict[int, LayerSpec]:
        """What each of cached_layers keeps between steps, by its place there."""
        sizes = {"block_size": block_size, "element_bytes": element_bytes}
        return {place: layer.cache_spec(**sizes) for place, layer in enumerate(self.cached_layers)}


@dataclass(frozen=True)
class LayerCache:
    """Keys and values of one layer, in blocks."""

    k_BKPD: Tensor
    v_BKPD: Tensor


@dataclass(frozen=True)
class StateCache:
    """States of one recurrent layer, in slots (S)."""

    conv_SIW: Tensor
    """The convolution's last inputs, [S, channels, width - 1], in the model's dtype."""
    ssm_S: Tensor
    """The recurrent states, float32 [S, I, N] (Mamba-1), [S, H, D, N] (Mamba-2), [S, H, N, D] (delta nets), or none."""


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, packed: the requests' tokens one after the other, without padding."""

    token_ids_T: Tensor
    """int64."""
    positions_T: Tensor
    """int64, each token's position in its request."""
    metas: tuple[AttentionMeta | StateMeta, ...]
    """Of each of the model's cached_layers; those of one group share the object. A recurrent one gets a StateMeta …"""
    caches: tuple[LayerCache | StateCache, ...]
    """Of each of the model's cached_layers. … and a StateCache."""


class Model(nn.Module):
    """A causal language model whose keys, values and states lie in caches that the caller owns."""

    info: ModelInfo
    dtype: torch.dtype
    is_recordable: bool = True
    """Whether decode steps are the same launches whatever their tokens are, as far as the model knows."""
    quantization: str | None = None
    """How linear weights are kept, one of kernels.linear.QUANTIZATIONS; None: in the model's dtype."""
    is_exact: bool = False
    """Whether what it says has the same bits in whatever steps a text is computed, and beside whatever else."""
    unused_weights: tuple[str, ...] = ()
    """Patterns of tensors that a checkpoint may have and this model leaves alone."""

    @abstractmethod
    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys, values and states into the caches: hidden_TE after the final norm."""

    @abstractmethod
    def logits(self, hidden_XE: Tensor) -> Tensor:
        """Score the vocabulary for any rows of forward's result: float32 [X, V]."""

    def prepare_highest(self) -> None:
        """Have ready, where it pays, what `highest` needs beside the weights; to be called once they are all there."""

    def highest(self, hidden_XE: Tensor) -> Tensor | None:
        """Where the highest of the logits is, of equal ones the first, without the logits: int64 [X].

        -1 where it isn't finite. None: it is to be found among the logits.
        """
        return None

    @abstractmethod
    def check_layers(self) -> None:
        """Assert that every layer is what the layer table says."""

    def keep_weights_as(self, quantization: str | None, *, exact: bool = False) -> None:
        """Say how linear weights are to be kept, before any is taken. It stands in `quantization`.

        exact: stands in `is_exact`: a row of a product is the same to the last bit whatever rows are beside it.
        """
        self.quantization, self.is_exact = quantization, exact
        for module in self.modules():
            if isinstance(module, WeightModule):
                module.quantization, module.is_exact = quantization, exact

    def weights(self) -> Iterator[tuple[Weight, Callable[[Weight, Tensor], None]]]:
        """Every weight, and where it is taken once it is filled."""
        for module in self.modules():
            if isinstance(module, WeightModule):
                for weight in module.weights:
                    yield weight, module.take_weight
