"""The skeleton of a decoder: embedding, layers, final norm, head."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.base import ForwardBatch, LayerCache, LayerInfo, Model, ModelInfo
from hybrid_engine.models.config import DecoderConfig
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.linear import Embedding
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.rope import RopeTables


class DecoderLayer(nn.Module):
    """What a decoder asks of its layers.

    A layer gets its input normed and returns what the next one gets: its sum with the residual stream is normed by
    the next layer's weight in the same pass that closes this layer.
    """

    input_norm: Norm

    @abstractmethod
    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its rows of the layer table say."""


class AttentionLayer(DecoderLayer):
    """Attention and an MLP; subclasses place the norms."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        name = f"model.layers.{info.index}"
        self.eps = config.norm_eps
        self.is_zero_centered = config.has_zero_centered_norms
        self.input_norm = Norm(f"{name}.input_layernorm", config.hidden_size)
        self.attention = Attention(f"{name}.self_attn", info, config)
        self.mlp = GatedMlp(
            f"{name}.mlp",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
        )

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        cache: LayerCache,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed."""
        raise NotImplementedError

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.attention.check(*rows)


@dataclass(frozen=True)
class LookedUp:
    """Where a decoder's layers begin."""

    embedded_TE: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...]
    """Cosines and sines of the positions, for each rope."""

    def tensors(self) -> list[Tensor]:
        """All of it, in a fixed order."""
        return [self.embedded_TE, *(tensor for table in self.tables for tensor in table)]


class Decoder(Model):
    """A causal language model of layers that stand one behind the other."""

    def __init__(self, config: DecoderConfig, layer: Callable[..., DecoderLayer], *, dtype: torch.dtype) -> None:
        """layer: makes a layer from its rows of the layer table and the config.

        The weights are taken later, from a loader.
        """
        super().__init__()
        self.config = config
        self.dtype = dtype
        sizes = {"vocab_size": config.vocab_size, "hidden_size": config.hidden_size}
        self.embedding = Embedding(
            config.names.embedding, scale=config.embedding_scale, is_head=config.is_tied, **sizes
        )
        self.rows = tuple(tuple(rows) for _, rows in groupby(config.layers, lambda info: info.index))
        """Of the layer table, by layer."""
        self.layers = tuple(layer(*rows, config) for rows in self.rows)
        self.layer_modules = nn.ModuleList(self.layers)  # so that torch knows them
        self.final_norm = Norm(config.names.final_norm, config.hidden_size)
        self.head = self.embedding if config.is_tied else Embedding("lm_head", is_head=True, **sizes)
        ropes = tuple(dict.fromkeys(rows[0].rope for rows in self.rows))
        self.rope_tables = RopeTables(ropes)
        self.table_indices = tuple(ropes.index(rows[0].rope) for rows in self.rows)
        self.info = self._describe()
        self.places = tuple(self._places(rows) for rows in self.rows)
        """Among the cached layers, by layer: what it keeps, or reads."""

    def _places(self, rows: tuple[LayerInfo, ...]) -> tuple[int, ...]:
        kept = [row if row.reads_layer is None else self.rows[row.reads_layer][0] for row in rows]
        cached = self.info.cached_layers
        return tuple(cached.index(row) for row in kept if row.has_cache)

    def _describe(self) -> ModelInfo:
        config = self.config
        return ModelInfo(
            architecture=config.architecture,
            layers=config.layers,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            max_position_embeddings=config.max_position_embeddings,
            eos_token_ids=config.eos_token_ids,
            bos_token_id=config.bos_token_id,
            num_parameters=sum(weight.num_elements for weight, _ in self.weights()),
        )

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys, values and states into the caches: hidden_TE after the final norm."""
        return self.run_layers(self.look_up(batch), batch)

    def look_up(self, batch: ForwardBatch) -> LookedUp:
        """What stands in tables for the batch's tokens and positions. All that follows depends on it, not on them."""
        return LookedUp(self.embedding(batch.token_ids_T), self.rope_tables(batch.positions_T))

    def run_layers(self, looked_up: LookedUp, batch: ForwardBatch) -> Tensor:
        """Do the rest of forward."""
        residual_TE, tables = looked_up.embedded_TE, looked_up.tables
        norms = [layer.input_norm.weight_E for layer in self.layers] + [self.final_norm.weight_E]
        eps, is_zero_centered = self.config.norm_eps, self.config.has_zero_centered_norms
        x_TE = rms_norm(residual_TE, norms[0], eps=eps, zero_centered=is_zero_centered)
        for index, layer in enumerate(self.layers):
            x_TE, residual_TE = layer(
                x_TE,
                residual_TE,
                table=tables[self.table_indices[index]],
                meta=of_layer(batch.metas, self.places[index]),
                cache=of_layer(batch.caches, self.places[index]),
                next_norm_E=norms[index + 1],
            )
        return x_TE

    def logits(self, hidden_XE: Tensor) -> Tensor:
        """Score the vocabulary for any rows of forward's result: float32 [X, V]."""
        config = self.config
        return self.head.scores(hidden_XE, divisor=config.logits_divisor, softcap=config.logits_softcap)

    def prepare_highest(self) -> None:
        """Make a screen of a large head; a softcap makes more scores equal than its bounds know of."""
        if self.config.logits_softcap is None and (self.config.logits_divisor or 1.0) > 0:
            self.head.make_screen()

    def highest(self, hidden_XE: Tensor) -> Tensor | None:
        """Where the highest score is, by the head's screen."""
        screen = self.head.screen
        return None if screen is None else screen.highest(hidden_XE, divisor=self.config.logits_divisor or 1.0)

    def check_layers(self) -> None:
        """Assert that every layer is what the layer table says."""
        assert len(self.layers) == self.info.num_layers, (len(self.layers), self.info)
        for layer, rows, index in zip(self.layers, self.rows, self.table_indices, strict=True):
            layer.check(*rows)
            assert self.rope_tables.ropes[index] == rows[0].rope, (self.rope_tables.ropes[index], rows)


def of_layer(values: Sequence[Any], places: tuple[int, ...]) -> Any:
    """What a layer gets of the metas or caches: one; None where it keeps nothing, and all where it keeps several."""
    if len(places) == 1:
        return values[places[0]]
    return tuple(values[place] for place in places) or None
