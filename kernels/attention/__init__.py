"""Attention over a cache of blocks: packed requests of any lengths, prefill and decode in one call.

A cache is two tensors [B, K, P, D], keys and values: block, kv head, slot, head size. Values' heads may have another
size than keys' (MiMo). Which blocks belong to which request, and where this step's tokens go, stands in AttentionMeta.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.attention.meta import AttentionMeta, Extent
from hybrid_engine.kernels.checks import FLOATS, check_dtype, check_same, check_shape
from hybrid_engine.kernels.dispatch import implementation

__all__ = [
    "AttentionMeta",
    "Extent",
    "attention",
    "copy_blocks",
    "has_kernels",
    "most_shared_queries",
    "qkv_norm_rope_write",
    "write_kv",
]


def write_kv(k_TKD: Tensor, v_TKD: Tensor, *, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, slots_T: Tensor) -> None:
    """Write each token's key and value into its slot of the cache, in place.

    k_TKD, v_TKD: the cache's dtype; any strides. slots_T: int64, block index * P + offset, each at most once.
    Raises ShapeError when shapes or dtypes don't fit.
    """
    num_tokens, (_, num_kv_heads, _, head_size) = slots_T.shape[0], _check_caches(k_cache_BKPD, v_cache_BKPD)
    check_shape("k_TKD", k_TKD, num_tokens, num_kv_heads, head_size)
    check_shape("v_TKD", v_TKD, num_tokens, num_kv_heads, v_cache_BKPD.shape[3])
    check_same("k_TKD", k_TKD, "k_cache_BKPD", k_cache_BKPD)
    check_same("v_TKD", v_TKD, "v_cache_BKPD", v_cache_BKPD)
    check_dtype("slots_T", slots_T, torch.int64)
    write = implementation(__name__, k_TKD.device.type).write_kv
    write(k_TKD, v_TKD, k_cache_BKPD=k_cache_BKPD, v_cache_BKPD=v_cache_BKPD, slots_T=slots_T)


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
    """Attend over the cache, into which this step's keys and values have been written before: out_THD, D the values'.

    q_THD: float32 or bfloat16, the caches' dtype; query heads h * H/K .. (h + 1) * H/K - 1 share kv head h.
    window: the query at position i sees keys max(0, i - window + 1) .. i; None: 0 .. i.
    chunk: it sees keys floor(i / chunk) * chunk .. i (Llama 4's local layers).
    softcap: scores become softcap * tanh(scores / softcap), after the scale (Gemma 2).
    sinks_H: a score for each head that takes its share of the softmax and gives nothing (GPT-OSS).
    Slots that no query sees are never read. Softmax and sums are in float32.
    Raises ShapeError when shapes or dtypes don't fit.
    """
    _, num_kv_heads, _, head_size = _check_caches(k_cache_BKPD, v_cache_BKPD)
    check_shape("q_THD", q_THD, meta.slots_T.shape[0], None, head_size)
    check_same("q_THD", q_THD, "k_cache_BKPD", k_cache_BKPD)
    if q_THD.shape[1] % num_kv_heads:
        raise ShapeError(f"q_THD has {q_THD.shape[1]} heads, must be a multiple of the {num_kv_heads} kv heads")
    for name, limit in (("window", window), ("chunk", chunk)):
        if limit is not None and limit < 1:
            raise ShapeError(f"{name} is {limit}, must be at least 1 token, or None for no limit")
    if sinks_H is not None:
        check_shape("sinks_H", sinks_H, q_THD.shape[1])
    attend = implementation(__name__, q_THD.device.type).attention
    return attend(
        q_THD,
        k_cache_BKPD=k_cache_BKPD,
        v_cache_BKPD=v_cache_BKPD,
        meta=meta,
        scale=scale,
        window=window,
        chunk=chunk,
        softcap=softcap,
        sinks_H=sinks_H,
    )


def has_kernels(device_type: str, *, head_size: int, value_size: int) -> bool:
    """Whether attention over heads of these sizes has kernels for a kind of device; torch does others, slowly."""
    return implementation(__name__, device_type).has_kernels(head_size, value_size)


def most_shared_queries(device_type: str, *, heads_per_kv: int, head_size: int, value_size: int) -> int:
    """Queries of a request for which a step's meta may say that it shares keys with others; 0: it changes nothing."""
    if not has_kernels(device_type, head_size=head_size, value_size=value_size):
        return 0
    size = max(head_size, value_size)
    return implementation(__name__, device_type).most_shared_queries(heads_per_kv, size)


def copy_blocks(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, *, copies: Sequence[tuple[int, int, int]]) -> None:
    """Copy slots [0, num_slots) of block source to block target, for each (source, target, num_slots) in order.

    Raises ShapeError when the caches don't fit each other or a copy leaves them.
    """
    num_blocks, _, block_size, _ = _check_caches(k_cache_BKPD, v_cache_BKPD)
    for source, target, num_slots in copies:
        if not (0 <= source < num_blocks and 0 <= target < num_blocks and 0 <= num_slots <= block_size):
            raise ShapeError(
                f"copy of {num_slots} slots from block {source} to {target}: "
                f"must stay within {num_blocks} blocks of {block_size} slots"
            )
    implementation(__name__, k_cache_BKPD.device.type).copy_blocks(k_cache_BKPD, v_cache_BKPD, copies=copies)


def qkv_norm_rope_write(
    qkv_TC: Tensor,
    *,
    k_cache_BKPD: Tensor,
    v_cache_BKPD: Tensor,
    slots_T: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    q_norm_D: Tensor | None = None,
    k_norm_D: Tensor | None = None,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> Tensor:
    """Split a packed projection, norm and rotate its queries and keys, write keys and values: q_THD.

    qkv_TC: the caches' dtype, C = (H + 2K) * D: all query heads, then all key heads, then all value heads (which may
    have a size of their own).
    cos_TD, sin_TD: float32, rotary tables of each token; a last dimension below D leaves the heads' tails as they are.
    q_norm_D, k_norm_D: weights of an RMSNorm over each head, the qkv's dtype or float32; None: no norm.
    zero_centered: the norms multiply by 1 + weight.
    One pass, in float32 until the results are stored. Raises ShapeError when shapes or dtypes don't fit.
    """
    num_tokens, (_, num_kv_heads, _, head_size) = slots_T.shape[0], _check_caches(k_cache_BKPD, v_cache_BKPD)
    check_shape("qkv_TC", qkv_TC, num_tokens, None)
    check_same("qkv_TC", qkv_TC, "k_cache_BKPD", k_cache_BKPD)
    check_dtype("slots_T", slots_T, torch.int64)
    value_columns = num_kv_heads * v_cache_BKPD.shape[3]
    num_rows, rest = divmod(qkv_TC.shape[1] - value_columns, head_size)
    if rest or num_rows <= num_kv_heads or num_rows % num_kv_heads:
        raise ShapeError(
            f"qkv_TC has {qkv_TC.shape[1]} columns, must be (H + {num_kv_heads}) * {head_size} + {value_columns} "
            f"with H a multiple of {num_kv_heads}"
        )
    check_shape("cos_TD", cos_TD, num_tokens, None)
    check_shape("sin_TD", sin_TD, *cos_TD.shape)
    if cos_TD.shape[1] > head_size or cos_TD.shape[1] % 2:
        raise ShapeError(f"cos_TD has {cos_TD.shape[1]} columns, must be even and at most the head size {head_size}")
    for name, weight_D in (("q_norm_D", q_norm_D), ("k_norm_D", k_norm_D)):
        if weight_D is not None:
            check_shape(name, weight_D, head_size)
    run = implementation(__name__, qkv_TC.device.type).qkv_norm_rope_write
    return run(
        qkv_TC,
        k_cache_BKPD=k_cache_BKPD,
        v_cache_BKPD=v_cache_BKPD,
        slots_T=slots_T,
        cos_TD=cos_TD,
        sin_TD=sin_TD,
        q_norm_D=q_norm_D,
        k_norm_D=k_norm_D,
        eps=eps,
        zero_centered=zero_centered,
    )


def _check_caches(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor) -> torch.Size:
    """The keys' shape; the values' differs in its last dimension at most."""
    check_shape("k_cache_BKPD", k_cache_BKPD, None, None, None, None)
    check_dtype("k_cache_BKPD", k_cache_BKPD, *FLOATS)
    check_shape("v_cache_BKPD", v_cache_BKPD, *k_cache_BKPD.shape[:3], None)
    check_same("v_cache_BKPD", v_cache_BKPD, "k_cache_BKPD", k_cache_BKPD)
    return k_cache_BKPD.shape
