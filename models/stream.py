"""Decoders whose layers take the residual stream as it is and give it back: where norms stand is theirs to say."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor, nn

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.base import ForwardBatch, LayerCache, LayerInfo
from hybrid_engine.models.config import DecoderConfig
from hybrid_engine.models.decoder import Decoder, DecoderLayer, of_layer
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.norm import Norm


class StreamLayer(DecoderLayer):
    """Attention and an MLP; subclasses place the norms."""

    attention_class: type[Attention] = Attention

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        layer, names = f"{config.names.layers}.{info.index}", config.names
        self.attention = self.attention_class(f"{layer}.{names.attention}", info, config)
        self.mlp = self.make_mlp(layer, info, config)

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """What follows attention, [T, E] to [T, E]. layer: the layer's name in the checkpoint."""
        return GatedMlp(
            f"{layer}.{config.names.mlp}",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
        )

    @abstractmethod
    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """The residual stream behind this layer, [T, E]."""

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.attention.check(*rows)


class PostNormLayer(StreamLayer):
    """A sublayer's output is normed, its input isn't (Olmo 3, Exaone 4)."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        layer = f"{config.names.layers}.{info.index}"
        self.post_attention_norm = Norm(f"{layer}.post_attention_layernorm", config.hidden_size)
        self.post_mlp_norm = Norm(f"{layer}.post_feedforward_layernorm", config.hidden_size)

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """The residual stream behind this layer, [T, E]."""
        out_TE = self.attention(x_TE, table=table, meta=meta, cache=cache)
        x_TE = x_TE + rms_norm(out_TE, self.post_attention_norm.weight_E, eps=self.eps)
        return x_TE + rms_norm(self.mlp(x_TE), self.post_mlp_norm.weight_E, eps=self.eps)


class StreamDecoder(Decoder):
    """A causal language model of such layers."""

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Run the batch, write its keys and values into the caches: hidden_TE after the final norm."""
        tables = self.rope_tables(batch.positions_T)
        x_TE = self.embedding(batch.token_ids_T)
        for layer, places, table in zip(self.layers, self.places, self.table_indices, strict=True):
            meta, cache = of_layer(batch.metas, places), of_layer(batch.caches, places)
            x_TE = layer(x_TE, table=tables[table], meta=meta, cache=cache)
        return self.norm_last(x_TE)

    def norm_last(self, x_TE: Tensor) -> Tensor:
        """The final norm."""
        config = self.config
        weight_E, is_zero_centered = self.final_norm.weight_E, config.has_zero_centered_norms
        return rms_norm(x_TE, weight_E, eps=config.norm_eps, zero_centered=is_zero_centered)
