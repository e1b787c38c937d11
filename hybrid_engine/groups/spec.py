"""What a layer keeps between steps, and how layers that keep the same form groups.

A *group* is the layers that share one kind of memory and one block size. A *block* is what a group allocates at
once: `block_size` tokens of all its layers. Its bytes are exactly what those layers need; no page is padded to
another group's size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hybrid_engine.errors import ConfigError

ENDLESS = 1 << 62
"""A token count that no request reaches."""


@dataclass(frozen=True)
class AttentionSpec:
    """Keys and values of one attention layer."""

    num_kv_heads: int
    head_size: int
    element_bytes: int
    block_size: int = 16
    """Tokens in a block."""
    v_head_size: int | None = None
    """Size of a value's heads where it differs from that of a key's; 0: values are parts of the keys."""

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ConfigError(f"block_size is {self.block_size}, must be at least 1 token")

    @property
    def kind(self) -> str:
        """The kind's name in tables and reports."""
        raise NotImplementedError

    @property
    def layer_token_bytes(self) -> int:
        """Bytes that one token takes in one layer: a key and a value."""
        return self.num_kv_heads * (self.head_size + self.value_size) * self.element_bytes

    @property
    def value_size(self) -> int:
        """Size of a value's heads."""
        return self.head_size if self.v_head_size is None else self.v_head_size

    @property
    def page_bytes(self) -> int:
        """Bytes that one block takes in one layer."""
        return sum(self.tensor_bytes)

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """The same, of the keys and of the values."""
        per_size = self.num_kv_heads * self.block_size * self.element_bytes
        return per_size * self.head_size, per_size * self.value_size


@dataclass(frozen=True)
class FullAttentionSpec(AttentionSpec):
    """A layer whose queries see every earlier token."""

    @property
    def kind(self) -> str:
        return "full_attention"


@dataclass(frozen=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer whose query i sees keys max(0, i - window + 1) .. i."""

    window: int = 0
    """Tokens a query sees, itself counted."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 1:
            raise ConfigError(f"window is {self.window}, must be at least 1 token")

    @property
    def kind(self) -> str:
        return "sliding_window"


@dataclass(frozen=True)
class ChunkedLocalSpec(AttentionSpec):
    """A layer whose query i sees keys floor(i / chunk) * chunk .. i (Llama 4's local layers)."""

    chunk: int = 0
    """Tokens in a chunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk < 1:
            raise ConfigError(f"chunk is {self.chunk}, must be at least 1 token")

    @property
    def kind(self) -> str:
        return "chunked_local"


@dataclass(frozen=True)
class MambaSpec:
    """The state of one recurrent layer after some number of tokens: its size does not depend on that number.

    Mamba-1, Mamba-2, gated delta nets and short convolutions differ only in the shapes.
    """

    conv_shape: tuple[int, int]
    """Channels of the convolution, and its last inputs that are kept (its width - 1)."""
    ssm_shape: tuple[int, ...]
    """The recurrent state; (0,), no elements, for a layer that only convolves."""
    conv_element_bytes: int
    ssm_element_bytes: int = 4
    """States drift in 16 bits: float32 unless said otherwise."""

    def __post_init__(self) -> None:
        if not self.ssm_shape:
            raise ConfigError("ssm_shape is (), which is one number, must be (0,) where there is no recurrent state")

    @property
    def kind(self) -> str:
        """The kind's name in tables and reports."""
        return "mamba"

    @property
    def block_size(self) -> int:
        """One block, a state, stands for any number of tokens."""
        return ENDLESS

    @property
    def page_bytes(self) -> int:
        """Bytes of one state in one layer."""
        return sum(self.tensor_bytes)

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """The same, of the convolution's inputs and of the recurrent state."""
        conv_bytes = math.prod(self.conv_shape) * self.conv_element_bytes
        return conv_bytes, math.prod(self.ssm_shape) * self.ssm_element_bytes


LayerSpec = AttentionSpec | MambaSpec
"""What one layer keeps."""
ATTENTION_KINDS = ("full_attention", "sliding_window", "chunked_local")
"""Kinds that keep keys and values, in blocks whose size can be chosen."""


def with_block_sizes(specs: Mapping[int, LayerSpec], block_sizes: Mapping[str, int]) -> dict[int, LayerSpec]:
    """The specs, with blocks of another size where one is named for their kind.

    Raises ConfigError for a kind that no layer is of.
    """
    kinds = {spec.kind for spec in specs.values()}
    if foreign := sorted(block_sizes.keys() - kinds):
        raise ConfigError(f"block_sizes names {', '.join(foreign)}, this model has {', '.join(sorted(kinds))}")
    return {
        index: replace(spec, block_size=block_sizes[spec.kind])
        if isinstance(spec, AttentionSpec) and spec.kind in block_sizes
        else spec
        for index, spec in specs.items()
    }


@dataclass(frozen=True)
class Group:
    """The layers that share one cache rule."""

    group_id: int
    spec: LayerSpec
    layer_indices: tuple[int, ...]

    @property
    def block_size(self) -> int:
        """Tokens in a block."""
        return self.spec.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all the group's layers."""
        return self.spec.page_bytes * len(self.layer_indices)


def group_layers(specs: Mapping[int, LayerSpec]) -> tuple[Group, ...]:
    """Put layers with equal specs into one group, in the order of their first layer.

    specs: what each layer that keeps anything keeps, by layer index.
    Raises ConfigError when no layer keeps anything.
    """
    if not specs:
        raise ConfigError("no layer keeps anything between steps: there is nothing to cache")
    layers: dict[LayerSpec, list[int]] = {}
    for layer_index in sorted(specs):
        layers.setdefault(specs[layer_index], []).append(layer_index)
    return tuple(Group(i, spec, tuple(indices)) for i, (spec, indices) in enumerate(layers.items()))
