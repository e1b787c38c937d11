"""Attention whose output is gated element by element, the gate projected together with the queries (Qwen 3 Next)."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from hybrid_engine.kernels.activation import act
from hybrid_engine.kernels.attention import AttentionMeta, attention, qkv_norm_rope_write
from hybrid_engine.models.layers.attention import Attention
from hybrid_engine.models.layers.linear import FusedLinear

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerCache, LayerInfo
    from hybrid_engine.models.config import DecoderConfig


def gates_first(weight_N: Tensor, num_heads: int) -> Tensor:
    """Bring the rows of a projection from (query, gate) of each head to all gates, then all queries."""
    return weight_N.unflatten(0, (num_heads, 2, -1)).flip(1).transpose(0, 1).flatten(0, 2)


class GatedAttention(Attention):
    """Project to gates, queries, keys and values, attend, gate, project back."""

    def make_qkv(self, name: str, config: DecoderConfig) -> FusedLinear:
        """The projection to gates, queries, keys and values, one behind the other."""
        names = {f"{name}.q_proj": 2 * self.q_size, f"{name}.k_proj": self.k_size, f"{name}.v_proj": self.v_size}
        changes = {f"{name}.q_proj": partial(gates_first, num_heads=self.info.num_heads)}
        return FusedLinear(config.hidden_size, names, has_bias=config.has_qkv_bias, changes=changes)

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """[T, E]. table: cosines and sines of the tokens' positions."""
        gate_TC, qkv_TC = self.qkv(x_TE).tensor_split([self.q_size], 1)
        q_THD = qkv_norm_rope_write(
            qkv_TC,
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
        )
        return self.out(out_THD.flatten(1) * act(gate_TC, kind="sigmoid"))

    def check(self, info: LayerInfo) -> None:
        """Assert that the loaded projections are those of this row of the layer table."""
        assert self.info == info, (self.info, info)
        columns = 2 * (info.num_heads + info.num_kv_heads) * info.head_size
        assert self.qkv.packed.num_outputs == columns, (self.qkv.packed.num_outputs, info)
        assert self.out.packed.num_inputs == self.q_size, (self.out.packed.num_inputs, info)
