"""Zamba 2: Mamba-2 in every layer, and before some a transformer block whose weights several layers share.

A shared block sees the residual stream beside the tokens' embeddings, and what it gives goes into the Mamba-2 of its
layer alone, not into the residual stream. Each use has adapters of its own, and keys and values of its own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.bamba import time_step_limit
from hybrid_engine.models.base import FULL, MAMBA2, ForwardBatch, LayerInfo, MambaInfo, Model
from hybrid_engine.models.config import DecoderConfig, Names, activation_of, positive, resolve, with_defaults
from hybrid_engine.models.decoder import Decoder, DecoderLayer, of_layer
from hybrid_engine.models.hybrid import Mixer, make_mixer
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.shared_block import SharedBlock

DEFAULTS = {
    "vocab_size": 32_000,
    "hidden_size": 2560,
    "intermediate_size": None,
    "num_hidden_layers": 54,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "hidden_act": "gelu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10_000.0,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "tie_word_embeddings": True,
    "add_bias_linear": False,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "num_mem_blocks": 1,
    "use_shared_attention_adapter": False,
    "adapter_rank": 128,
    "use_mem_rope": False,
    "use_long_context": False,
}
HYBRID = "hybrid"
"""What configs call a layer with a shared block."""
MAMBA_NAMES = ("mamba", "linear_attention")
DEFAULT_PATTERN = tuple(HYBRID if index in (*range(6, 43, 6), 47, 51) else "mamba" for index in range(54))
GATED_NORM_EPS = 1e-5


@dataclass(frozen=True)
class ZambaConfig(DecoderConfig):
    """A decoder with shared blocks."""

    block: str = "shared_transformer"
    """What checkpoints call a shared block."""
    num_blocks: int = 1
    """Shared blocks, which take turns."""
    adapter_rank: int | None = None
    """Of the adapters of the shared MLPs; None: there are none."""
    has_attention_adapters: bool = False

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """The layers with a shared block."""
        return tuple(layer.index for layer in self.layers if layer.kind == FULL)


def resolve_zamba2(config: Mapping[str, Any]) -> ZambaConfig:
    """Layers with a shared block have two rows: its attention, then Mamba-2.

    Time steps are cut to time_step_limit, which is no limit unless the config has one: so the models were trained.
    transformers 5.24 cuts them to time_step_min, and that in a prompt alone, not in the tokens that follow.
    """
    values = with_defaults(config, DEFAULTS)
    if values["use_long_context"]:
        raise ConfigError("use_long_context is true, which rescales the rope in a way that isn't supported: unset it")
    pattern = layer_pattern(values, DEFAULT_PATTERN)
    values["intermediate_size"] = values["intermediate_size"] or 4 * positive(values, "hidden_size")
    settled = shared_blocks(values, pattern, mamba2_info(values), recurrent=MAMBA2)
    for row in settled.layers if values["use_shared_attention_adapter"] else ():
        if row.num_kv_heads != row.num_heads:
            raise ConfigError(
                f"num_key_value_heads is {row.num_kv_heads}, must be num_attention_heads ({row.num_heads}) where the "
                "attention has adapters"
            )
    return replace(
        settled,
        has_mlp_bias=values["add_bias_linear"],
        num_blocks=positive(values, "num_mem_blocks"),
        adapter_rank=positive(values, "adapter_rank"),
        has_attention_adapters=values["use_shared_attention_adapter"],
        names=Names(final_norm="model.final_layernorm", mlp="feed_forward", mlp_gate_up=("gate_up_proj",)),
    )


def layer_pattern(values: Mapping[str, Any], default: tuple[str, ...]) -> tuple[bool, ...]:
    """Whether each layer has a shared block. Raises ConfigError for another name or number of layers."""
    num_layers = positive(values, "num_hidden_layers")
    names = values.get("layers_block_type") or values.get("layer_types")
    if names is None and len(default) != num_layers:
        raise ConfigError(f"layers_block_type is missing, must say of each of the {num_layers} layers what it is")
    names = names or default
    if len(names) != num_layers:
        raise ConfigError(
            f"layers_block_type has {len(names)} entries, must have one for each of the {num_layers} layers"
        )
    if foreign := sorted(set(names) - {HYBRID, *MAMBA_NAMES}):
        raise ConfigError(f"layers_block_type holds {', '.join(foreign)}; known here: {HYBRID}, {MAMBA_NAMES[0]}")
    return tuple(name == HYBRID for name in names)


def shared_blocks(
    values: Mapping[str, Any], pattern: tuple[bool, ...], mamba: MambaInfo, *, recurrent: str
) -> ZambaConfig:
    """A config of one recurrent row a layer, preceded by one of attention where the layer has a shared block."""
    head_size = 2 * positive(values, "hidden_size") // positive(values, "num_attention_heads")
    # The activation is the shared MLPs'; recurrent layers have silu whatever it is.
    settled = {**values, "head_dim": head_size, "hidden_act": "silu"}
    if not values.get("use_mem_rope"):
        settled |= {"rope_theta": None, "rope_parameters": None}
    base = resolve(settled, tuple(FULL if is_shared else recurrent for is_shared in pattern), mamba=mamba)
    rows = []
    for layer, is_shared in zip(base.layers, pattern, strict=True):
        rows += [layer] if is_shared else []
        rows += [LayerInfo(index=layer.index, kind=recurrent, mamba=mamba)]
    changes = {"layers": tuple(rows), "attention_scale": (head_size / 2) ** -0.5, "activation": activation_of(values)}
    return ZambaConfig(**vars(base) | changes)


def mamba2_info(values: Mapping[str, Any]) -> MambaInfo:
    """The recurrent rows. Raises ConfigError when the heads don't make up the inner width."""
    inner_size = positive(values, "mamba_expand") * positive(values, "hidden_size")
    num_heads = positive(values, "n_mamba_heads")
    if inner_size % num_heads:
        raise ConfigError(f"n_mamba_heads is {num_heads}, must divide mamba_expand * hidden_size ({inner_size})")
    return MambaInfo(
        inner_size=inner_size,
        state_size=positive(values, "mamba_d_state"),
        conv_width=positive(values, "mamba_d_conv"),
        num_heads=num_heads,
        num_groups=positive(values, "mamba_ngroups"),
        gated_norm_eps=GATED_NORM_EPS,
        dt_limit=time_step_limit(values.get("time_step_limit", (0.0, math.inf))),
        has_bias=values["add_bias_linear"],
    )


class ZambaLayer(DecoderLayer):
    """A recurrent mixer, before which a shared block may look at the tokens."""

    def __init__(self, rows: tuple[LayerInfo, ...], config: ZambaConfig, block: SharedBlock | None, use: int) -> None:
        """block: the shared one, and which of all uses of shared blocks this is."""
        super().__init__()
        self.rows, self.eps = rows, config.norm_eps
        name = f"{config.names.layers}.{rows[-1].index}"
        decoder = f"{name}.mamba_decoder" if block is not None else name
        self.input_norm = Norm(f"{decoder}.{config.names.input_norm}", config.hidden_size)
        self.mixer: Mixer = make_mixer(rows[-1], config, layer=decoder)
        self.block, self.use = block, use
        self.linear = FusedLinear(config.hidden_size, {f"{name}.linear": config.hidden_size}) if block else None

    def forward(
        self, x_TE: Tensor, embedded_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: Any, cache: Any
    ) -> Tensor:
        """The residual stream behind the layer: [T, E]. meta, cache: the shared block's first, if there is one."""
        mixed_TE = x_TE
        if self.block is not None and self.linear is not None:
            (block_meta, meta), (block_cache, cache) = meta, cache
            seen_TE = self.block(x_TE, embedded_TE, use=self.use, table=table, meta=block_meta, cache=block_cache)
            mixed_TE = x_TE + self.linear(seen_TE)
        normed_TE = rms_norm(mixed_TE, self.input_norm.weight_E, eps=self.eps)
        return x_TE + self.mixer(normed_TE, meta=meta, cache=cache)

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its rows of the layer table say."""
        assert self.rows == rows, (self.rows, rows)
        self.mixer.check(rows[-1])


class LayerMaker:
    """Makes the layers of one model, whose shared blocks it remembers."""

    def __init__(self) -> None:
        self.blocks: dict[int, SharedBlock] = {}

    def __call__(self, *rows_and_config: Any) -> ZambaLayer:
        """The layer of one or two rows of the layer table."""
        *rows, config = rows_and_config
        if len(rows) == 1:
            return ZambaLayer(tuple(rows), config, None, 0)
        layers = config.shared_layers
        use = layers.index(rows[0].index)
        number = use % config.num_blocks
        if number not in self.blocks:
            name = f"{config.names.layers}.{rows[0].index}.{config.block}"
            uses = tuple(range(number, len(layers), config.num_blocks))
            self.blocks[number] = SharedBlock(name, uses, rows[0], config)
        return ZambaLayer(tuple(rows), config, self.blocks[number], use)


class ZambaDecoder(Decoder):
    """A decoder whose layers see the embeddings too."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys, values and states into the caches: hidden_TE after the final norm."""
        tables = self.rope_tables(batch.positions_T)
        x_TE = embedded_TE = self.embedding(batch.token_ids_T)
        for index, layer in enumerate(self.layers):
            x_TE = layer(
                x_TE,
                embedded_TE,
                table=tables[self.table_indices[index]],
                meta=of_layer(batch.metas, self.places[index]),
                cache=of_layer(batch.caches, self.places[index]),
            )
        return rms_norm(x_TE, self.final_norm.weight_E, eps=self.config.norm_eps)


def build(config: DecoderConfig, dtype: torch.dtype) -> Model:
    """A Zamba of either kind, without weights."""
    return ZambaDecoder(config, LayerMaker(), dtype=dtype)
