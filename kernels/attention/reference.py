"""Attention over blocks in plain torch, written to be obviously right; runs on any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_engine.kernels.attention.meta import AttentionMeta
from hybrid_engine.kernels.norm import reference as norm_reference
from hybrid_engine.kernels.rope import reference as rope_reference


def write_kv(k_TKD: Tensor, v_TKD: Tensor, *, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, slots_T: Tensor) -> None:
    """Put each token's key and value into its slot."""
    block_size = k_cache_BKPD.shape[2]
    blocks_T, offsets_T = slots_T // block_size, slots_T % block_size
    k_cache_BKPD[blocks_T, :, offsets_T] = k_TKD
    v_cache_BKPD[blocks_T, :, offsets_T] = v_TKD


def gather(cache_BKPD: Tensor, table: Tensor, *, start: int, stop: int) -> Tensor:
    """Keys or values of positions [start, stop) of one request: float32 [stop - start, K, D]."""
    positions = torch.arange(start, stop, device=cache_BKPD.device)
    block_size = cache_BKPD.shape[2]
    blocks = table.long()[positions // block_size]
    return cache_BKPD[blocks, :, positions % block_size].float()


def first_visible(position: int, *, window: int | None, chunk: int | None) -> int:
    """The first key that the query at this position sees."""
    lowest = 0
    if window is not None:
        lowest = max(lowest, position - window + 1)
    if chunk is not None:
        lowest = max(lowest, position // chunk * chunk)
    return lowest


def attention(
    q_THD: Tensor,
    *,
    k_cache_BKPD: Tensor,
    v_cache_BKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """One query at a time: gather what it sees, softmax in float32, weigh the values."""
    out_THD = q_THD.new_empty(*q_THD.shape[:2], v_cache_BKPD.shape[3])
    num_groups = q_THD.shape[1] // k_cache_BKPD.shape[1]
    starts = meta.query_starts.tolist()
    for request, num_keys in enumerate(meta.num_keys.tolist()):
        for token in range(starts[request], starts[request + 1]):
            position = num_keys - (starts[request + 1] - token)
            visible = {"start": first_visible(position, window=window, chunk=chunk), "stop": position + 1}
            table = meta.block_tables_RB[request]
            k_SHD = gather(k_cache_BKPD, table, **visible).repeat_interleave(num_groups, 1)
            v_SHD = gather(v_cache_BKPD, table, **visible).repeat_interleave(num_groups, 1)
            scores_HS = torch.einsum("hd,shd->hs", q_THD[token].float(), k_SHD) * scale
            if softcap is not None:
                scores_HS = softcap * torch.tanh(scores_HS / softcap)
            if sinks_H is not None:  # a sink takes its share of the softmax and gives nothing
                scores_HS = torch.cat([scores_HS, sinks_H.float()[:, None]], 1)
            weights_HS = scores_HS.softmax(1)[:, : v_SHD.shape[0]]
            out_THD[token] = torch.einsum("hs,shd->hd", weights_HS, v_SHD).to(q_THD.dtype)
    return out_THD


def copy_blocks(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, *, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy slots [0, num_slots) for each (source, target, num_slots), one after the other."""
    for source, target, num_slots in copies:
        k_cache_BKPD[target, :, :num_slots] = k_cache_BKPD[source, :, :num_slots]
        v_cache_BKPD[target, :, :num_slots] = v_cache_BKPD[source, :, :num_slots]


def qkv_norm_rope_write(
    qkv_TC: Tensor,
    *,
    k_cache_BKPD: Tensor,
    v_cache_BKPD: Tensor,
    slots_T: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm_D: Tensor | None,
    k_norm_D: Tensor | None,
    eps: float,
    zero_centered: bool,
) -> Tensor:
    """Norm, rotate and store one after the other, in float32 in between."""
    num_kv_heads, head_size, value_size = k_cache_BKPD.shape[1], k_cache_BKPD.shape[3], v_cache_BKPD.shape[3]
    qk_TC, v_TC = qkv_TC.float().tensor_split([qkv_TC.shape[1] - num_kv_heads * value_size], 1)
    q_THD, k_TKD = qk_TC.unflatten(1, (-1, head_size)).tensor_split([qk_TC.shape[1] // head_size - num_kv_heads], 1)
    v_TKD = v_TC.unflatten(1, (num_kv_heads, value_size))
    if q_norm_D is not None:
        q_THD = norm_reference.rms_norm(q_THD, q_norm_D, eps=eps, zero_centered=zero_centered)
    if k_norm_D is not None:
        k_TKD = norm_reference.rms_norm(k_TKD, k_norm_D, eps=eps, zero_centered=zero_centered)
    q_THD, k_TKD = rope_reference.apply_rope(q_THD, k_TKD, cos_TD=cos_TD, sin_TD=sin_TD)
    dtype = k_cache_BKPD.dtype
    write_kv(k_TKD.to(dtype), v_TKD.to(dtype), k_cache_BKPD=k_cache_BKPD, v_cache_BKPD=v_cache_BKPD, slots_T=slots_T)
    return q_THD.to(qkv_TC.dtype)
