"""Decoders whose layers mix tokens by attention or by a recurrence, and may have an MLP behind it."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.attention import AttentionMeta
from hybrid_engine.kernels.norm import add_rms_norm, rms_norm
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.base import DELTA_NET, MAMBA, MAMBA2, SHORT_CONV, LayerCache, LayerInfo, StateCache
from hybrid_engine.models.config import DecoderConfig
from hybrid_engine.models.decoder import DecoderLayer
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.delta_net import DeltaNet
from hybrid_engine.models.layers.latent_attention import LatentAttention
from hybrid_engine.models.layers.mamba import MambaMixer
from hybrid_engine.models.layers.mamba2 import Mamba2Mixer
from hybrid_engine.models.layers.mlp import GatedMlp
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.rg_lru import RgLruMixer
from hybrid_engine.models.layers.short_conv import ShortConv
from hybrid_engine.models.layers.sliced_mamba import SlicedMambaMixer

Mixer = Attention | LatentAttention | MambaMixer | SlicedMambaMixer | Mamba2Mixer | ShortConv | DeltaNet | RgLruMixer


def make_mixer(info: LayerInfo, config: DecoderConfig, *, layer: str | None = None) -> Mixer:
    """What mixes the tokens in a layer of this kind. layer: its name in the checkpoint, where it is an unusual one."""
    layer, names = layer or f"{config.names.layers}.{info.index}", config.names
    if info.mamba is not None and info.mamba.num_slices is not None:
        return SlicedMambaMixer(f"{layer}.{names.mamba}", info, config)
    if info.kind == MAMBA:
        return MambaMixer(f"{layer}.{names.mamba}", info, config)
    if info.kind == MAMBA2:
        return Mamba2Mixer(f"{layer}.{names.mamba}", info, config)
    if info.kind == SHORT_CONV:
        return ShortConv(f"{layer}.{names.short_conv}", info, config)
    if info.kind == DELTA_NET:
        return DeltaNet(f"{layer}.{names.delta_net}", info, config)
    if info.latent is not None:
        return LatentAttention(f"{layer}.{names.attention}", info, config)
    return Attention(f"{layer}.{names.attention}", info, config)


class ResidualLayer(DecoderLayer):
    """Sublayers, each of which adds to the residual stream; subclasses make them."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.has_float32_residual = config.has_float32_residual
        self.residual_scale = config.residual_scale
        self.input_norm = Norm(f"{config.names.layers}.{info.index}.{config.names.input_norm}", config.hidden_size)
        self.is_zero_centered = config.has_zero_centered_norms

    def close(self, x_TE: Tensor, residual_TE: Tensor, norm_E: Tensor) -> tuple[Tensor, Tensor]:
        """End a sublayer: add its output to the residual stream, norm the sum for what comes next."""
        if self.residual_scale is not None:
            x_TE = x_TE * self.residual_scale
        if not self.has_float32_residual or x_TE.dtype == torch.float32:
            return add_rms_norm(x_TE, residual_TE, norm_E, eps=self.eps, zero_centered=self.is_zero_centered)
        sum_TE = residual_TE.float() + x_TE
        # Rounded before it is normed, as the models were trained.
        x_TE = rms_norm(sum_TE.to(x_TE.dtype), norm_E, eps=self.eps, zero_centered=self.is_zero_centered)
        return x_TE, sum_TE


class MixerLayer(ResidualLayer):
    """A mixer and nothing else (Mamba); subclasses add an MLP."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        self.mixer = self.make_mixer(info, config)

    def make_mixer(self, info: LayerInfo, config: DecoderConfig) -> Mixer:
        """What mixes the tokens."""
        return make_mixer(info, config)

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta | StateMeta,
        cache: LayerCache | StateCache,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed."""
        x_TE = self.mix(x_TE, table=table, meta=meta, cache=cache)
        return self.close(x_TE, residual_TE, next_norm_E)

    def mix(
        self,
        x_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta | StateMeta,
        cache: LayerCache | StateCache,
    ) -> Tensor:
        """Run the mixer with the metadata and the cache of its kind: [T, E]."""
        if isinstance(self.mixer, Attention | LatentAttention):
            assert isinstance(meta, AttentionMeta), type(meta)
            assert isinstance(cache, LayerCache), type(cache)
            return self.mixer(x_TE, table=table, meta=meta, cache=cache)
        assert isinstance(meta, StateMeta), type(meta)
        assert isinstance(cache, StateCache), type(cache)
        return self.mixer(x_TE, meta=meta, cache=cache)

    def check(self, *rows: LayerInfo) -> None:
        """Assert that the loaded layer is what its row of the layer table says."""
        self.mixer.check(*rows)


class MlpLayer(MixerLayer):
    """A mixer and an MLP, a norm before each; subclasses make the MLP."""

    def __init__(self, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__(info, config)
        layer, names = f"{config.names.layers}.{info.index}", config.names
        self.pre_mlp_norm = Norm(f"{layer}.{names.pre_mlp_norm}", config.hidden_size)
        self.mlp = self.make_mlp(layer, info, config)

    @abstractmethod
    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """What follows the mixer, [T, E] to [T, E]. layer: the layer's name in the checkpoint."""

    def forward(
        self,
        x_TE: Tensor,
        residual_TE: Tensor,
        *,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta | StateMeta,
        cache: LayerCache | StateCache,
        next_norm_E: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(input of the next layer, residual stream), both [T, E]. x_TE: the residual stream, normed."""
        x_TE = self.mix(x_TE, table=table, meta=meta, cache=cache)
        x_TE, residual_TE = self.close(x_TE, residual_TE, self.pre_mlp_norm.weight_E)
        return self.close(self.mlp(x_TE), residual_TE, next_norm_E)


class DenseLayer(MlpLayer):
    """A mixer and a gated MLP."""

    def make_mlp(self, layer: str, info: LayerInfo, config: DecoderConfig) -> nn.Module:
        """A gated MLP."""
        return GatedMlp(
            f"{layer}.{config.names.mlp}",
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            activation=config.activation,
            has_bias=config.has_mlp_bias,
            gate_up=config.names.mlp_gate_up,
            down=config.names.mlp_down,
        )
