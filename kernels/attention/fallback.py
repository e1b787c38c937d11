"""Attention over blocks with torch alone, for what the fast paths don't take: gather per request, then SDPA."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.attention.meta import AttentionMeta
from hybrid_engine.kernels.attention.reference import first_visible

QUERY_TILE = 512
"""Queries handled at once, so that a window costs window + 512 keys a query and not the whole prefix."""


def attention(
    q_THD: Tensor,
    *,
    k_cache_BKPD: Tensor,
    v_cache_BKPD: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int | None,
    chunk: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Tile by tile of each request's queries; keys below what a tile sees are never gathered.

    Exact: query by query, for torch sums in an order that depends on how many there are.
    """
    num_together = 1 if meta.is_exact else QUERY_TILE
    out_THD = q_THD.new_empty(*q_THD.shape[:2], v_cache_BKPD.shape[3])
    starts = meta.query_starts.tolist()
    plain = softcap is None and sinks_H is None
    for request, num_keys in enumerate(meta.num_keys.tolist()):
        start, stop = starts[request], starts[request + 1]
        first_position = num_keys - (stop - start)
        for token in range(start, stop, num_together):
            last_token = min(token + num_together, stop)
            positions = range(first_position + token - start, first_position + last_token - start)
            lowest = first_visible(positions[0], window=window, chunk=chunk)
            span = slice(lowest, positions[-1] + 1)
            table = meta.block_tables_RB[request]
            k_KSD, v_KSD = (_gather(cache, table, span) for cache in (k_cache_BKPD, v_cache_BKPD))
            mask = _mask(positions, span, window=window, chunk=chunk, device=q_THD.device)
            q_HTD = q_THD[token:last_token].transpose(0, 1)
            if plain:
                out_HTD = F.scaled_dot_product_attention(
                    q_HTD[None], k_KSD[None], v_KSD[None], attn_mask=mask, scale=scale, enable_gqa=True
                )[0]
            else:
                out_HTD = _capped(q_HTD, k_KSD, v_KSD, mask, scale=scale, softcap=softcap, sinks_H=sinks_H)
            out_THD[token:last_token] = out_HTD.transpose(0, 1)
    return out_THD


def _gather(cache_BKPD: Tensor, table: Tensor, span: slice) -> Tensor:
    """Keys or values of the span's positions: [K, S, D]."""
    block_size = cache_BKPD.shape[2]
    first_block = span.start // block_size
    last_block = (span.stop - 1) // block_size
    blocks = table[first_block : last_block + 1]
    num_blocks, wanted = len(cache_BKPD), last_block + 1 - first_block
    if len(blocks) != wanted or not 0 <= int(blocks.min()) <= int(blocks.max()) < num_blocks:
        raise IndexError(f"blocks {blocks.tolist()}: must be {wanted} of them, each within [0, {num_blocks})")
    found_KSD = cache_BKPD[blocks].transpose(0, 1).flatten(1, 2)
    return found_KSD[:, span.start - first_block * block_size : span.stop - first_block * block_size]


def _mask(
    positions: range, span: slice, *, window: int | None, chunk: int | None, device: torch.device
) -> Tensor | None:
    """bool [T, S], true where a query sees a key; None when a single query sees them all."""
    if len(positions) == 1:
        return None
    queries = torch.arange(positions.start, positions.stop, device=device)[:, None]
    keys = torch.arange(span.start, span.stop, device=device)[None]
    mask = keys <= queries
    if window is not None:
        mask &= keys > queries - window
    if chunk is not None:
        mask &= keys >= queries // chunk * chunk
    return mask


def _capped(
    q_HTD: Tensor,
    k_KSD: Tensor,
    v_KSD: Tensor,
    mask: Tensor | None,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention with what SDPA lacks: soft-capped scores and sinks."""
    num_heads, num_kv_heads = q_HTD.shape[0], k_KSD.shape[0]
    # Query heads that share a kv head stand together, so one product serves them all.
    q_KGTD = q_HTD.unflatten(0, (num_kv_heads, num_heads // num_kv_heads)).float()
    scores = torch.einsum("kgtd,ksd->kgts", q_KGTD, k_KSD.float()) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H.float().view(num_kv_heads, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : v_KSD.shape[1]]
    return torch.einsum("kgts,ksd->kgtd", weights, v_KSD.float()).flatten(0, 1).to(q_HTD.dtype)
