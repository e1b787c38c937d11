"""The attention of Gemma 3n and Gemma 4: values are normed too, and the last layers read what earlier ones keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hybrid_engine.kernels.attention import AttentionMeta, write_kv
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.rope import apply_rope
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.linear import FusedLinear

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerCache, LayerInfo
    from hybrid_engine.models.config import DecoderConfig


class SharedAttention(Attention):
    """A layer that reads another one's keys and values has queries alone; its rope is that of the other."""

    def __init__(self, name: str, info: LayerInfo, config: DecoderConfig, *, has_values: bool = True) -> None:
        """has_values: whether values have a projection of their own; they are the keys, normed otherwise, if not."""
        self.has_values = has_values
        super().__init__(name, info, config)
        if info.reads_layer is not None:
            self.k_norm = None

    def make_qkv(self, name: str, config: DecoderConfig) -> FusedLinear:
        """The projection to what this layer makes itself."""
        inner = {f"{name}.q_proj": self.q_size}
        if self.info.reads_layer is None:
            inner[f"{name}.k_proj"] = self.k_size
            if self.has_values:
                inner[f"{name}.v_proj"] = self.v_size
        return FusedLinear(config.hidden_size, inner, has_bias=config.has_qkv_bias)

    def write(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Write the tokens' keys and values into the cache, unless another layer does: their queries, [T, H, D]."""
        assert self.q_norm is not None, self.info
        heads_TXD = self.qkv(x_TE).unflatten(1, (-1, self.info.head_size))
        q_THD = rms_norm(heads_TXD[:, : self.info.num_heads], self.q_norm.weight_E, eps=self.eps)
        if self.info.reads_layer is not None:
            return apply_rope(q_THD, q_THD[:, :1], cos_TD=table[0], sin_TD=table[1])[0]
        assert self.k_norm is not None, self.info
        kv_TXD = heads_TXD[:, self.info.num_heads :]
        k_TKD, v_TKD = kv_TXD[:, : self.info.num_kv_heads], kv_TXD[:, -self.info.num_kv_heads :]
        k_TKD = rms_norm(k_TKD, self.k_norm.weight_E, eps=self.eps)
        v_TKD = rms_norm(v_TKD, torch.ones_like(self.k_norm.weight_E), eps=self.eps)
        q_THD, k_TKD = apply_rope(q_THD, k_TKD, cos_TD=table[0], sin_TD=table[1])
        write_kv(k_TKD, v_TKD, k_cache_BKPD=cache.k_BKPD, v_cache_BKPD=cache.v_BKPD, slots_T=meta.slots_T)
        return q_THD

    def check(self, info: LayerInfo) -> None:
        """Assert that the loaded projections are those of this row of the layer table."""
        assert self.info == info, (self.info, info)
        kept = 0 if info.reads_layer is not None else self.k_size + (self.v_size if self.has_values else 0)
        assert self.qkv.packed.num_outputs == self.q_size + kept, (self.qkv.packed.num_outputs, info)
        assert self.out.packed.num_inputs == self.q_size, (self.out.packed.num_inputs, info)
