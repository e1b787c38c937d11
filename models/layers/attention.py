"""The attention layer over a cache of blocks."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor, nn

from hybrid_engine.kernels.activation import act
from hybrid_engine.kernels.attention import AttentionMeta, attention, qkv_norm_rope_write, write_kv
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.rope import apply_rope
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm
from hybrid_engine.models.layers.weight import Vector
from hybrid_engine.weights.parts import undo_interleaving

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
        self.value_scale = config.value_scale
        self.eps = config.norm_eps
        self.is_zero_centered = config.has_zero_centered_norms
        self.q_size = info.num_heads * info.head_size
        self.k_size, self.v_size = info.num_kv_heads * info.head_size, info.num_kv_heads * info.value_size
        self.qkv = self.make_qkv(name, config)
        out, names = {f"{name}.{config.names.attention_out}": config.hidden_size}, config.names
        self.out = FusedLinear(info.num_heads * info.value_size, out, has_bias=config.has_output_bias)
        self.q_norm = Norm(f"{name}.{names.q_norm}", self.q_norm_size) if config.has_qk_norm else None
        self.k_norm = Norm(f"{name}.{names.k_norm}", self.k_norm_size) if config.has_qk_norm else None
        gate = {f"{name}.gate_proj": info.num_heads}
        self.gate = FusedLinear(config.hidden_size, gate) if config.has_attention_gate else None
        self.sinks = Vector(f"{name}.{names.sinks}", info.num_heads) if info.has_sinks else None

    @property
    def q_norm_size(self) -> int:
        """Elements of a query that are normed together."""
        return self.info.head_size

    @property
    def k_norm_size(self) -> int:
        """Elements of a key that are normed together."""
        return self.info.head_size

    def make_qkv(self, name: str, config: DecoderConfig) -> FusedLinear:
        """The projection to queries, keys and values, one behind the other."""
        info, names = self.info, config.names.qkv
        if len(names) == 1:  # fused in the checkpoint
            inner = {f"{name}.{names[0]}": self.q_size + self.k_size + self.v_size}
            return FusedLinear(config.hidden_size, inner, has_bias=config.has_qkv_bias)
        q, k, v = (f"{name}.{one}" for one in names)
        changes = {}
        if config.has_interleaved_rope and info.rope.rotary_size:
            # Queries and keys alike, so that their products stay what they are.
            assert not config.has_qk_norm, info
            changes = {
                q: partial(undo_interleaving, num_heads=info.num_heads),
                k: partial(undo_interleaving, num_heads=info.num_kv_heads),
            }
        inner = {q: self.q_size, k: self.k_size, v: self.v_size}
        return FusedLinear(config.hidden_size, inner, has_bias=config.has_qkv_bias, changes=changes)

    def forward(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """[T, E]. table: cosines and sines of the tokens' positions."""
        out_THD = attention(
            self.write(x_TE, table=table, meta=meta, cache=cache),
            k_cache_BKPD=cache.k_BKPD,
            v_cache_BKPD=cache.v_BKPD,
            meta=meta,
            scale=self.scale,
            window=self.info.window,
            chunk=self.info.chunk,
            softcap=self.softcap,
            sinks_H=None if self.sinks is None else self.sinks.weight_E,
        )
        if self.gate is not None:
            out_THD = out_THD * act(self.gate(x_TE), kind="sigmoid")[:, :, None]
        if self.value_scale is not None:
            out_THD = out_THD * self.value_scale
        return self.out(out_THD.flatten(1))

    def write(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Write the tokens' keys and values into the cache: their queries, [T, H, D]."""
        return qkv_norm_rope_write(
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

    def check(self, info: LayerInfo) -> None:
        """Assert that the loaded projections are those of this row of the layer table."""
        assert self.info == info, (self.info, info)
        qkv_size = (info.num_heads + info.num_kv_heads) * info.head_size + info.num_kv_heads * info.value_size
        assert self.qkv.packed.num_outputs == qkv_size, (self.qkv.packed.num_outputs, info)
        assert self.out.packed.num_inputs == info.num_heads * info.value_size, (self.out.packed.num_inputs, info)
        for norm, size in ((self.q_norm, self.q_norm_size), (self.k_norm, self.k_norm_size)):
            assert norm is None or norm.weight_E.shape == (size,), (norm.weight_E.shape, info)


class WideNormAttention(Attention):
    """Queries and keys are normed over all heads together (Olmo 3)."""

    @property
    def q_norm_size(self) -> int:
        """Elements of a query that are normed together."""
        return self.q_size

    @property
    def k_norm_size(self) -> int:
        """Elements of a key that are normed together."""
        return self.k_size

    def write(self, x_TE: Tensor, *, table: tuple[Tensor, Tensor], meta: AttentionMeta, cache: LayerCache) -> Tensor:
        """Write the tokens' keys and values into the cache: their queries, [T, H, D]."""
        assert self.q_norm is not None, self.info
        assert self.k_norm is not None, self.info
        q_TC, k_TC, v_TC = self.qkv(x_TE).split([self.q_size, self.k_size, self.v_size], 1)
        q_THD = rms_norm(q_TC, self.q_norm.weight_E, eps=self.eps).unflatten(1, (self.info.num_heads, -1))
        k_TKD = rms_norm(k_TC, self.k_norm.weight_E, eps=self.eps).unflatten(1, (self.info.num_kv_heads, -1))
        v_TKD = v_TC.unflatten(1, (self.info.num_kv_heads, -1))
        q_THD, k_TKD = apply_rope(q_THD, k_TKD, cos_TD=table[0], sin_TD=table[1])
        write_kv(k_TKD, v_TKD, k_cache_BKPD=cache.k_BKPD, v_cache_BKPD=cache.v_BKPD, slots_T=meta.slots_T)
        return q_THD
