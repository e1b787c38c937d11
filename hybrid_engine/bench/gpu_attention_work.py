"""Calls of attention on random tensors, for gpu_work."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional as F

from hybrid_engine.bench.gpu_work import BLOCK_SIZE, Run, Work, make_meta, random_tensor
from hybrid_engine.kernels import attention
from hybrid_engine.kernels.attention import reference as attention_reference


@dataclass(frozen=True)
class Heads:
    """The attention of one model."""

    name: str
    query: int
    kv: int
    size: int
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    has_sinks: bool = False
    value_size: int | None = None
    """Of a value where it differs from a key's."""
    is_latent: bool = False
    """Whether values are the first elements of the keys."""


def make_attention(
    device: torch.device,
    dtype: torch.dtype,
    heads: Heads,
    num_queries: list[int],
    num_keys: list[int],
    num_shared_blocks: int = 0,
) -> Work:
    """Attention over blocks; the peer gets its keys and values in one piece, where all requests are alike."""
    meta, num_blocks = make_meta(device, num_queries, num_keys, num_shared_blocks=num_shared_blocks)
    shape, value_size = (num_blocks, heads.kv, BLOCK_SIZE), heads.value_size or heads.size
    k_cache_BKPD = random_tensor(device, dtype, *shape, heads.size)
    if heads.is_latent:
        v_cache_BKPD = k_cache_BKPD[..., :value_size]
    else:
        v_cache_BKPD = random_tensor(device, dtype, *shape, value_size)
    q_THD = random_tensor(device, dtype, sum(num_queries), heads.query, heads.size)
    options = {
        "k_cache_BKPD": k_cache_BKPD,
        "v_cache_BKPD": v_cache_BKPD,
        "meta": meta,
        "scale": heads.size**-0.5,
        "window": heads.window,
        "chunk": heads.chunk,
        "softcap": heads.softcap,
        "sinks_H": torch.randn(heads.query, device=device) if heads.has_sinks else None,
    }
    seen, products = _seen_keys(heads, num_queries, num_keys)
    peers = _attention_peers(device, dtype, heads, num_queries, num_keys)
    if num_shared_blocks:
        seen -= num_shared_blocks * BLOCK_SIZE * (len(num_keys) - 1)
        own = {**options, "meta": replace(meta, shared=None)}
        peers["each request reads its own"] = lambda: attention.attention(q_THD, **own)
    pair_bytes = heads.kv * (heads.size + (0 if heads.is_latent else value_size)) * dtype.itemsize
    return Work(
        lambda: attention.attention(q_THD, **options),
        lambda: attention_reference.attention(q_THD, **options),
        num_bytes=seen * pair_bytes + q_THD.numel() * (1 + value_size / heads.size) * dtype.itemsize,
        num_flops=2.0 * products * heads.query * (heads.size + value_size),
        peers=peers,
    )


def _seen_keys(heads: Heads, num_queries: list[int], num_keys: list[int]) -> tuple[int, int]:
    """Keys that must be read, each once a request; and pairs of a query and a key that it sees."""
    limit = min(heads.window or 1 << 30, heads.chunk or 1 << 30)
    keys = pairs = 0
    for queries, total in zip(num_queries, num_keys, strict=True):
        keys += min(total, queries - 1 + limit) if queries else 0
        pairs += sum(min(position + 1, limit) for position in range(total - queries, total))
    return keys, pairs


def _attention_peers(
    device: torch.device, dtype: torch.dtype, heads: Heads, num_queries: list[int], num_keys: list[int]
) -> dict[str, Run]:
    is_plain = not (heads.softcap or heads.has_sinks or heads.window or heads.chunk or heads.value_size)
    is_alike = len(set(num_queries)) == len(set(num_keys)) == 1
    is_square = num_queries == num_keys
    if device.type != "cuda" or not is_plain or not is_alike or not (is_square or num_queries[0] == 1):
        return {}
    q = random_tensor(device, dtype, len(num_keys), heads.query, num_queries[0], heads.size)
    k, v = (random_tensor(device, dtype, len(num_keys), heads.kv, num_keys[0], heads.size) for _ in range(2))
    is_causal = num_queries[0] > 1
    return {
        "torch SDPA, keys in one piece": lambda: F.scaled_dot_product_attention(
            q, k, v, is_causal=is_causal, enable_gqa=True
        )
    }
