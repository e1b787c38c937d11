"""A transformer block that several layers share, each with adapters of its own (Zamba)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.attention import AttentionMeta, attention, qkv_norm_rope_write
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.models.layers.linear import FusedLinear
from hybrid_engine.models.layers.norm import Norm

if TYPE_CHECKING:
    from hybrid_engine.models.base import LayerCache, LayerInfo
    from hybrid_engine.models.zamba2 import ZambaConfig


class Adapter(nn.Module):
    """A product of two thin matrices for each of some projections of the same input."""

    def __init__(self, names: list[str], *, num_inputs: int, rank: int, num_outputs: int) -> None:
        """names: of the adapters in the checkpoint, in the order of the output."""
        super().__init__()
        self.down = FusedLinear(num_inputs, {f"{name}.0": rank for name in names})
        self.ups = nn.ModuleList(FusedLinear(rank, {f"{name}.1": num_outputs}) for name in names)

    def forward(self, x_TE: Tensor) -> Tensor:
        """What is added to the projections, side by side: [T, N]."""
        parts = self.down(x_TE).chunk(len(self.ups), dim=1)
        return torch.cat([up(part) for up, part in zip(self.ups, parts, strict=True)], 1)


class SharedBlock(nn.Module):
    """Attention over the residual stream beside the embeddings, then an MLP; nothing is added to what comes in."""

    def __init__(self, name: str, uses: tuple[int, ...], info: LayerInfo, config: ZambaConfig) -> None:
        """name: in the checkpoint. uses: the numbers, among all uses of shared blocks, of this block's."""
        super().__init__()
        self.info, self.eps, self.scale = info, config.norm_eps, config.attention_scale
        self.activation = config.activation
        width, inner, rank = config.hidden_size, config.intermediate_size, config.adapter_rank
        attention, mlp = f"{name}.self_attn", f"{name}.{config.names.mlp}"
        query_size, kv_size = info.num_heads * info.head_size, info.num_kv_heads * info.head_size
        sizes = {"q": query_size, "k": kv_size, "v": kv_size}
        self.input_norm = Norm(f"{name}.input_layernorm", 2 * width)
        self.qkv = FusedLinear(2 * width, {f"{attention}.{part}_proj": size for part, size in sizes.items()})
        self.out = FusedLinear(query_size, {f"{attention}.o_proj": width})
        self.pre_mlp_norm = Norm(f"{name}.pre_ff_layernorm", width)
        gate_up = {f"{mlp}.{part}": 2 * inner // len(config.names.mlp_gate_up) for part in config.names.mlp_gate_up}
        self.gate_up = FusedLinear(width, gate_up, has_bias=config.has_mlp_bias)
        self.down = FusedLinear(inner, {f"{mlp}.down_proj": width}, has_bias=config.has_mlp_bias)
        self.qkv_adapters, self.mlp_adapters = nn.ModuleDict(), nn.ModuleDict()
        if rank is None:
            return
        for use in uses:
            names = [f"{mlp}.gate_up_proj_adapter_list.{use}"]
            self.mlp_adapters[str(use)] = Adapter(names, num_inputs=width, rank=rank, num_outputs=2 * inner)
            names = [f"{attention}.linear_{part}_adapter_list.{use}" for part in sizes]
            if config.has_attention_adapters:
                adapter = Adapter(names, num_inputs=2 * width, rank=rank, num_outputs=query_size)
                self.qkv_adapters[str(use)] = adapter

    def forward(
        self,
        x_TE: Tensor,
        embedded_TE: Tensor,
        *,
        use: int,
        table: tuple[Tensor, Tensor],
        meta: AttentionMeta,
        cache: LayerCache,
    ) -> Tensor:
        """[T, E]. use: its number among all uses of shared blocks; cache: that use's."""
        both_TC = rms_norm(torch.cat([x_TE, embedded_TE], 1), self.input_norm.weight_E, eps=self.eps)
        qkv_TC = self.qkv(both_TC)
        if str(use) in self.qkv_adapters:
            qkv_TC = qkv_TC + self.qkv_adapters[str(use)](both_TC)
        k_BKPD, v_BKPD = cache.k_BKPD, cache.v_BKPD
        q_THD = qkv_norm_rope_write(
            qkv_TC,
            k_cache_BKPD=k_BKPD,
            v_cache_BKPD=v_BKPD,
            slots_T=meta.slots_T,
            cos_TD=table[0],
            sin_TD=table[1],
        )
        attended_THD = attention(q_THD, k_cache_BKPD=k_BKPD, v_cache_BKPD=v_BKPD, meta=meta, scale=self.scale)
        x_TE = rms_norm(self.out(attended_THD.flatten(1)), self.pre_mlp_norm.weight_E, eps=self.eps)
        gate_up_TC = self.gate_up(x_TE)
        if str(use) in self.mlp_adapters:
            gate_up_TC = gate_up_TC + self.mlp_adapters[str(use)](x_TE)
        return self.down(act_mul(gate_up_TC, kind=self.activation))
