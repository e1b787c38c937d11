"""The attention layer over a cache of blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.attention import AttentionMeta, attention, qkv_norm_rope_write
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerCache, LayerInfo
    from hybrid_engine.models.config import DecoderConfig


class Attention(nn.Module):
    """Project, norm and turn, write to the cache, attend, project back."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig) -> None:
        super().__init__()
        self.info = info
        self.scale = config.attention_scale
        self.softcap = config.attention_softcap
        self.eps = config.norm_eps
        self.is_zero_centered = config.has_zero_centered_norms
        query_size, kv_size = info.num_heads * info.head_size, info.num_kv_heads * info.head_size
        inner = {f"{name}.q_proj": query_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        self.qkv = FusedLinear(config.hidden_size, inner, has_bias=config.has_qkv_bias)
        out, names = {f"{name}.{config.names.attention_out}": config.hidden_size}, config.names
        self.out = FusedLinear(query_size, out, has_bias=config.has_output_bias)
        self.q_norm = Norm(f"{name}.{names.q_norm}", info.head_size) if config.has_qk_norm else None
        self.k_norm = Norm(f"{name}.{names.k_norm}", info.head_size) if config.has_qk_norm else None
        gate = {f"{name}.gate_proj": info.num_heads}
        self.gate = FusedLinear(config.hidden_size, gate) if config.has_attention_gate else None

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """[T, E]. table: cosines and sines of the tokens' positions."""
        q_THD = qkv_norm_rope_write(
            self.qkv(x_TE),
            k_cache_BKPD=cache.k_BKPD,
            v_cache_BKPD=cache.v_BKPD,
            slots_T=meta.slots_T,
            cos_TD=table[0],
            sin_TD=table[1],
            q_norm_D=None if self.q_norm is None else self.q_norm.weight_E,
            k_norm_D=None if self.k_norm is None else self.k_norm.weight_E,
            eps=self.eps,
            zero_centered=self.is_zero_centered,
        )
        out_THD = attention(
            q_THD,
            k_cache_BKPD=cache.k_BKPD,
            v_cache_BKPD=cache.v_BKPD,
            meta=meta,
            scale=self.scale,
            window=self.info.window,
            chunk=self.info.chunk,
            softcap=self.softcap,
        )
        if self.gate is not None:
            out_THD = out_THD * torch.sigmoid(self.gate(x_TE))[:, :, None]
        return self.out(out_THD.flatten(1))

    def check(self, info: LayerInfo) -> None:
        """Assert that the loaded projections are those of this row of the layer table."""
        assert self.info == info, (self.info, info)
        qkv_size = (info.num_heads + 2 * info.num_kv_heads) * info.head_size
        assert self.qkv.packed.num_outputs == qkv_size, (self.qkv.packed.num_outputs, info)
        assert self.out.packed.num_inputs == info.num_heads * info.head_size, (self.out.packed.num_inputs, info)
        for norm in (self.q_norm, self.k_norm):
            assert norm is None or norm.weight_E.shape == (info.head_size,), (norm.weight_E.shape, info)
