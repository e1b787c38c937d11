"""Attention over blocks on a CPU: C++ where it can be built, else torch."""

from __future__ import annotations

import torch
from torch import Tensor

from hybrid_engine.kernels.attention import fallback, reference
from hybrid_engine.kernels.attention.meta import AttentionMeta
from hybrid_engine.kernels.checks import FLOATS
from hybrid_engine.kernels.native import NativeLibrary, num_threads

_LANES = 16
"""The C++ takes head sizes that are a multiple of this, as all models' are; others go through torch."""
_MAX_HEAD_SIZE = 1024

_ATTENTION = "ppppppppp" + "l" * 20 + "ffi?"
_QKV_NORM_ROPE_WRITE = "ppppppppp" + "ii" + "l" * 15 + "f?"

_SHARED_QUERIES = 17
_SHARED_HEADS = 16
"""Requests of more tokens, or with more heads on a kv head, have rows enough to repay reading keys by themselves."""

copy_blocks = reference.copy_blocks

library = NativeLibrary(
    __package__,
    {
        "attention_float": _ATTENTION,
        "attention_bf16": _ATTENTION,
        "qkv_norm_rope_write_float": _QKV_NORM_ROPE_WRITE,
        "qkv_norm_rope_write_bf16": _QKV_NORM_ROPE_WRITE,
        "write_kv": "ppppp" + "l" * 16 + "?",
    },
)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, *, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, slots_T: Tensor) -> None:
    """As reference.write_kv."""
    native = library.load()
    if native is None or not (_has_whole_heads(k_cache_BKPD) and _has_whole_heads(v_cache_BKPD)):
        _check_slots(slots_T, k_cache_BKPD)
        reference.write_kv(k_TKD, v_TKD, k_cache_BKPD=k_cache_BKPD, v_cache_BKPD=v_cache_BKPD, slots_T=slots_T)
        return
    k_TKD, v_TKD, slots_T = _with_rows(k_TKD), _with_rows(v_TKD), slots_T.contiguous()
    num_tokens, num_heads, head_size = k_TKD.shape
    bytes_each = k_TKD.element_size()
    strides = (*k_TKD.stride()[:2], *v_TKD.stride()[:2], *k_cache_BKPD.stride()[:3], *v_cache_BKPD.stride()[:3])
    is_done = native.write_kv(
        k_TKD.data_ptr(),
        v_TKD.data_ptr(),
        k_cache_BKPD.data_ptr(),
        v_cache_BKPD.data_ptr(),
        slots_T.data_ptr(),
        num_tokens,
        k_cache_BKPD.shape[0],
        num_heads,
        k_cache_BKPD.shape[2],
        head_size * bytes_each,
        v_TKD.shape[2] * bytes_each,
        *(stride * bytes_each for stride in strides),
        num_threads(),
    )
    if not is_done:
        _check_slots(slots_T, k_cache_BKPD)


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
    """As reference.attention."""
    native = library.load()
    num_tokens, num_heads, _ = q_THD.shape
    if native is None or not _can_run(k_cache_BKPD, v_cache_BKPD):
        return fallback.attention(
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
    q_THD = _with_rows(q_THD)
    if sinks_H is not None:
        sinks_H = sinks_H.float().contiguous()
    tables_RB = meta.block_tables_RB if meta.block_tables_RB.stride(1) == 1 else meta.block_tables_RB.contiguous()
    tiles_XC = None if meta.shared is None else meta.shared.tiles_XC.contiguous()
    out_THD = torch.empty(num_tokens, num_heads, v_cache_BKPD.shape[3], dtype=q_THD.dtype)
    run = native.attention_bf16 if q_THD.dtype == torch.bfloat16 else native.attention_float
    is_done = run(
        q_THD.data_ptr(),
        k_cache_BKPD.data_ptr(),
        v_cache_BKPD.data_ptr(),
        out_THD.data_ptr(),
        meta.query_starts.data_ptr(),
        meta.num_keys.data_ptr(),
        tables_RB.data_ptr(),
        None if sinks_H is None else sinks_H.data_ptr(),
        None if tiles_XC is None else tiles_XC.data_ptr(),
        meta.num_keys.shape[0],
        num_heads,
        *k_cache_BKPD.shape,
        v_cache_BKPD.shape[3],
        *q_THD.stride()[:2],
        *k_cache_BKPD.stride()[:3],
        *v_cache_BKPD.stride()[:3],
        tables_RB.stride(0),
        tables_RB.shape[1],
        0 if tiles_XC is None else len(tiles_XC),
        window or 0,
        chunk or 0,
        scale,
        softcap or 0.0,
        meta.is_exact,
        num_threads(),
    )
    if not is_done:
        raise IndexError(
            f"num_keys {meta.num_keys.tolist()} with queries from {meta.query_starts.tolist()} and block tables "
            f"{list(tables_RB.shape)} don't fit each other, a visible entry leaves [0, {k_cache_BKPD.shape[0]}), "
            f"or a tile of shared keys names a request beyond {meta.num_keys.shape[0] - 1}"
        )
    return out_THD


def has_kernels(*sizes: int) -> bool:
    """Whether the C++ is there, and takes heads of these sizes."""
    return library.load() is not None and all(0 < size <= _MAX_HEAD_SIZE and size % _LANES == 0 for size in sizes)


def most_shared_queries(heads_per_kv: int, _head_size: int) -> int:
    """A token and its drafts."""
    return _SHARED_QUERIES if heads_per_kv <= _SHARED_HEADS else 0


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
    """As reference.qkv_norm_rope_write."""
    native = library.load()
    norm_dtype = _norm_dtype(q_norm_D, k_norm_D)
    if native is None or norm_dtype is None or not _can_run(k_cache_BKPD, v_cache_BKPD):
        _check_slots(slots_T, k_cache_BKPD)
        return reference.qkv_norm_rope_write(
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
    if qkv_TC.stride(1) != 1:
        qkv_TC = qkv_TC.contiguous()
    slots_T, cos_TD, sin_TD = slots_T.contiguous(), cos_TD.contiguous(), sin_TD.contiguous()
    q_norm_D = None if q_norm_D is None else q_norm_D.contiguous()
    k_norm_D = None if k_norm_D is None else k_norm_D.contiguous()
    num_tokens, num_columns = qkv_TC.shape
    num_kv_heads, head_size, value_size = k_cache_BKPD.shape[1], k_cache_BKPD.shape[3], v_cache_BKPD.shape[3]
    num_heads = (num_columns - num_kv_heads * value_size) // head_size - num_kv_heads
    q_THD = torch.empty(num_tokens, num_heads, head_size, dtype=qkv_TC.dtype)
    run = native.qkv_norm_rope_write_bf16 if qkv_TC.dtype == torch.bfloat16 else native.qkv_norm_rope_write_float
    is_done = run(
        qkv_TC.data_ptr(),
        q_THD.data_ptr(),
        k_cache_BKPD.data_ptr(),
        v_cache_BKPD.data_ptr(),
        slots_T.data_ptr(),
        cos_TD.data_ptr(),
        sin_TD.data_ptr(),
        None if q_norm_D is None else q_norm_D.data_ptr(),
        None if k_norm_D is None else k_norm_D.data_ptr(),
        norm_dtype == torch.bfloat16,
        zero_centered,
        num_tokens,
        num_heads,
        *k_cache_BKPD.shape,
        value_size,
        cos_TD.shape[1],
        qkv_TC.stride(0),
        *k_cache_BKPD.stride()[:3],
        *v_cache_BKPD.stride()[:3],
        eps,
        num_threads(),
    )
    if not is_done:
        _check_slots(slots_T, k_cache_BKPD)
    return q_THD


def _norm_dtype(q_norm_D: Tensor | None, k_norm_D: Tensor | None) -> torch.dtype | None:
    """The weights' dtype, float32 without weights, None when the C++ doesn't take them."""
    first = k_norm_D if q_norm_D is None else q_norm_D
    if first is None:
        return torch.float32
    if k_norm_D is not None and k_norm_D.dtype != first.dtype:
        return None
    return first.dtype if first.dtype in FLOATS else None


def _check_slots(slots_T: Tensor, cache_BKPD: Tensor) -> None:
    num_slots = cache_BKPD.shape[0] * cache_BKPD.shape[2]
    if len(slots_T) and not 0 <= int(slots_T.min()) <= int(slots_T.max()) < num_slots:
        raise IndexError(f"slots_T holds {slots_T.min()} .. {slots_T.max()}, must be within [0, {num_slots})")


def _with_rows(x_THD: Tensor) -> Tensor:
    """The tensor, copied only if its heads don't lie in one piece."""
    return x_THD if x_THD.stride(2) == 1 else x_THD.contiguous()


def _has_whole_heads(cache_BKPD: Tensor) -> bool:
    """Whether a head's elements lie in one piece; slots, heads and blocks may be apart."""
    return cache_BKPD.stride(3) == 1 or cache_BKPD.shape[3] == 0


def _can_run(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor) -> bool:
    are_whole = _has_whole_heads(k_cache_BKPD) and _has_whole_heads(v_cache_BKPD)
    return are_whole and has_kernels(k_cache_BKPD.shape[3], v_cache_BKPD.shape[3])
