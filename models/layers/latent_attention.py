"""Multi-head latent attention: of a token one latent vector is kept, from which all heads' keys and values come.

The projections from the latent are taken to the other side: instead of each key and value, the query is projected once
and the result once (DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1.2). So all heads read one kv head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.attention import AttentionMeta, attention, write_kv
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.weight import WeightModule
from hybrid_engine.weights.parts import Part, Weight

if TYPE_CHECKING:
    from hybrid_engine.models.base import LatentInfo, LayerCache, LayerInfo
    from hybrid_engine.models.config import DecoderConfig

LATENT_EPS = 1e-6
"""Of the norms of latent vectors, whatever the others have."""


class FromLatent(WeightModule):
    """The projections from the latent to each head's key and value."""

    key_HNL: Tensor
    """[H, own_size, latent_size]."""
    value_HDL: Tensor
    """[H, value_size, latent_size]."""

    def __init__(self, name: str, num_heads: int, latent: LatentInfo) -> None:
        super().__init__()
        self.sizes = [latent.own_size, latent.value_size]
        self.num_heads = num_heads
        shape = (num_heads * sum(self.sizes), latent.latent_size)
        self.weights = (Weight("both", (Part(f"{name}.weight", shape),)),)

    def take_weight(self, weight: Weight, tensor: Tensor) -> None:
        """Cut it: each head's rows for its key stand before those for its value."""
        key_HNL, value_HDL = tensor.unflatten(0, (self.num_heads, -1)).split(self.sizes, 1)
        self.key_HNL, self.value_HDL = key_HNL.contiguous(), value_HDL.contiguous()


class LatentAttention(nn.Module):
    """Project queries, keep the latent, attend to latents, project the result to values, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        assert info.latent is not None, info
        assert not info.rope.rotary_size, info
        self.info, self.latent = info, info.latent
        self.scale = config.attention_scale
        latent, width = self.latent, config.hidden_size
        self.query_size = latent.own_size + latent.shared_size
        columns = info.num_heads * self.query_size
        self.query_norm, self.to_rank = None, None
        if latent.query_rank is None:
            self.query = FusedLinear(width, {f"{name}.q_proj": columns})
        else:
            rank = latent.query_rank
            self.to_rank = FusedLinear(width, {f"{name}.q_a_proj": rank}, has_bias=config.has_qkv_bias)
            self.query_norm = Norm(f"{name}.q_a_layernorm", rank)
            self.query = FusedLinear(rank, {f"{name}.q_b_proj": columns})
        kept = {f"{name}.kv_a_proj_with_mqa": latent.latent_size + latent.shared_size}
        self.to_latent = FusedLinear(width, kept, has_bias=config.has_qkv_bias)
        self.latent_norm = Norm(f"{name}.kv_a_layernorm", latent.latent_size)
        self.from_latent = FromLatent(f"{name}.kv_b_proj", info.num_heads, latent)
        inner = info.num_heads * latent.value_size
        self.out = FusedLinear(inner, {f"{name}.o_proj": width}, has_bias=config.has_output_bias)

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """[T, E]. Nothing turns here."""
        self.write(x_TE, meta=meta, cache=cache)
        latents_BKPL = cache.k_BKPD[..., : self.latent.latent_size]
        out_THL = attention(
            self.queries(x_TE, meta=meta),
            k_cache_BKPD=cache.k_BKPD,
            v_cache_BKPD=latents_BKPL,
            meta=meta,
            scale=self.scale,
        )
        values_THD = times_heads(out_THL, self.from_latent.value_HDL.transpose(1, 2), is_exact=meta.is_exact)
        return self.out(values_THD.flatten(1))

    def write(self, x_TE: Tensor, *, meta: AttentionMeta, cache: LayerCache) -> None:
        """Keep the tokens' latents, and behind each what the heads share."""
        latent_TL, shared_TS = self.to_latent(x_TE).tensor_split([self.latent.latent_size], 1)
        latent_TL = rms_norm(latent_TL, self.latent_norm.weight_E, eps=LATENT_EPS)
        k_TKD = torch.cat([latent_TL, shared_TS], 1)[:, None]
        no_values = k_TKD[:, :, :0]
        write_kv(k_TKD, no_values, k_cache_BKPD=cache.k_BKPD, v_cache_BKPD=cache.v_BKPD, slots_T=meta.slots_T)

    def queries(self, x_TE: Tensor, *, meta: AttentionMeta) -> Tensor:
        """Queries of latents, [T, H, latent_size + shared_size]."""
        if self.to_rank is not None and self.query_norm is not None:
            x_TE = rms_norm(self.to_rank(x_TE), self.query_norm.weight_E, eps=LATENT_EPS)
        q_THD = self.query(x_TE).unflatten(1, (self.info.num_heads, self.query_size))
        own_THN, shared_THS = q_THD.tensor_split([self.latent.own_size], 2)
        latent_THL = times_heads(own_THN, self.from_latent.key_HNL, is_exact=meta.is_exact)
        return torch.cat([latent_THL, shared_THS], 2)

    def check(self, info: LayerInfo) -> None:
        """Assert that what was loaded is what this row of the layer table says."""
        assert self.info == info, (self.info, info)
        shape = (info.num_heads, self.latent.own_size, self.latent.latent_size)
        assert self.from_latent.key_HNL.shape == shape, (self.from_latent.key_HNL.shape, info)


def times_heads(x_THN: Tensor, weight_HNL: Tensor, *, is_exact: bool) -> Tensor:
    """Each head's part of a token times the head's own matrix: [T, H, L].

    is_exact: token by token, for torch sums in an order that depends on how many there are.
    """
    x_HTN = x_THN.transpose(0, 1)
    if is_exact and len(x_THN) > 1:
        return torch.cat([x_H1N @ weight_HNL for x_H1N in x_HTN.split(1, 1)], 1).transpose(0, 1)
    return (x_HTN @ weight_HNL).transpose(0, 1)
