"""Attention over blocks on a GPU: one launch for requests of several queries, one and a merge for those of one.

Values whose heads differ in size from keys' go through torch, and so do heads too large for a tile (latent attention).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.attention import fallback, reference
from hybrid_engine.kernels.attention.meta import AttentionMeta
from hybrid_engine.kernels.attention.triton_decode import decode_kernel, merge_kernel
from hybrid_engine.kernels.attention.triton_prefill import prefill_kernel
from hybrid_engine.kernels.attention.triton_write import copy_kernel, qkv_norm_rope_write_kernel, write_kernel
from hybrid_engine.kernels.triton_math import dot_precision

_MAX_HEAD_SIZE = 512
SPLIT_TOKENS = 256
"""Keys of one split in decoding: fixed, so that a request's result doesn't depend on its neighbours."""
_MERGE_SPLITS = 16
_UNLIMITED = 1 << 30
"""Stands for no window and no chunk; positions stay below it."""
_PROGRAM_ELEMENTS = 4096
_MIN_DOT = 16


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work, by the head size and dtype."""

    rows: int
    """Rows of queries and heads in a tile; at least one token's."""
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(dtype: torch.dtype, size_padded: int) -> Tiles:
    """The table of prefill: large tiles, smaller ones where float32 takes three products for one."""
    if dtype == torch.float32:
        return Tiles(rows=16, keys=32 if size_padded <= 128 else 16, num_warps=8, num_stages=1)
    # One stage: Hopper's pipelined products with an operand out of registers are known to go wrong in some shapes, and
    # none was tried on a GPU yet.
    if size_padded <= 128:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=1)
    return Tiles(rows=128 if size_padded <= 256 else 64, keys=32, num_warps=8, num_stages=1)


def decode_tiles(dtype: torch.dtype, size_padded: int) -> Tiles:
    """The table of decode, whose rows are the heads of a group."""
    if dtype == torch.float32 or size_padded > 256:
        return Tiles(rows=_MIN_DOT, keys=16 if size_padded > 128 else 32, num_warps=8, num_stages=1)
    return Tiles(rows=_MIN_DOT, keys=64 if size_padded <= 128 else 32, num_warps=4, num_stages=3)


def write_kv(k_TKD: Tensor, v_TKD: Tensor, *, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, slots_T: Tensor) -> None:
    """As reference.write_kv; tokens whose slot is below 0 are passed over."""
    num_tokens, num_heads, size = k_TKD.shape
    if k_TKD.numel() == 0:
        return
    if k_TKD.shape != v_TKD.shape:
        reference.write_kv(k_TKD, v_TKD, k_cache_BKPD=k_cache_BKPD, v_cache_BKPD=v_cache_BKPD, slots_T=slots_T)
        return
    write_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        k_cache_BKPD,
        v_cache_BKPD,
        slots_T.contiguous(),
        *k_TKD.stride(),
        *v_TKD.stride(),
        *_strides(k_cache_BKPD),
        *_strides(v_cache_BKPD),
        NUM_HEADS=num_heads,
        SIZE=size,
        BLOCK_SIZE=k_cache_BKPD.shape[2],
        HEADS=next_power_of_2(num_heads),
        PADDED=next_power_of_2(size),
    )


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
    """As reference.attention; what a request without keys gets is anything."""
    if k_cache_BKPD.shape != v_cache_BKPD.shape or k_cache_BKPD.shape[3] > _MAX_HEAD_SIZE:
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
    if q_THD.stride(2) != 1:
        q_THD = q_THD.contiguous()
    num_tokens, num_heads, size = q_THD.shape
    out_THD = torch.empty(num_tokens, num_heads, size, dtype=q_THD.dtype, device=q_THD.device)
    if out_THD.numel() == 0:
        return out_THD
    tables_RB = meta.block_tables_RB if meta.block_tables_RB.stride(1) == 1 else meta.block_tables_RB.contiguous()
    limits = {"window": window or _UNLIMITED, "chunk": chunk or _UNLIMITED}
    options = {
        "scale": scale,
        "softcap": softcap or 0.0,
        "stride_table": tables_RB.stride(0),
        "GROUP": num_heads // k_cache_BKPD.shape[1],
        "SIZE": size,
        "PADDED": max(_MIN_DOT, next_power_of_2(size)),
        "BLOCK_SIZE": k_cache_BKPD.shape[2],
        "HAS_CAP": softcap is not None,
        "PRECISION": dot_precision(q_THD.dtype),
        **limits,
        **_named_strides(q_THD, k_cache_BKPD, v_cache_BKPD),
    }
    caches = (k_cache_BKPD, v_cache_BKPD)
    extent = meta.extent
    if extent.most_queries > 1 or meta.is_exact:
        _prefill(q_THD, caches, out_THD, meta, tables_RB, sinks_H, options)
    if extent.most_keys_of_single_queries > 0 and not meta.is_exact:
        num_splits = _num_splits(extent.most_keys_of_single_queries, min(limits.values()))
        _decode(q_THD, caches, out_THD, meta, tables_RB, sinks_H, options, num_splits)
    return out_THD


def _prefill(
    q_THD: Tensor,
    caches: tuple[Tensor, Tensor],
    out_THD: Tensor,
    meta: AttentionMeta,
    tables_RB: Tensor,
    sinks_H: Tensor | None,
    options: dict,
) -> None:
    num_tokens, num_rows = len(q_THD), len(meta.num_keys)
    tiles = prefill_tiles(q_THD.dtype, options["PADDED"])
    queries = max(1, tiles.rows // options["GROUP"])
    prefill_kernel[(num_tokens // queries + num_rows, caches[0].shape[1])](
        q_THD,
        *caches,
        q_THD if sinks_H is None else sinks_H,
        out_THD,
        meta.query_starts,
        meta.num_keys,
        tables_RB,
        num_rows,
        QUERIES=queries,
        ROWS=max(_MIN_DOT, next_power_of_2(queries * options["GROUP"])),
        TILE=tiles.keys,
        HAS_SINKS=sinks_H is not None,
        IS_EXACT=meta.is_exact,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )


def _decode(
    q_THD: Tensor,
    caches: tuple[Tensor, Tensor],
    out_THD: Tensor,
    meta: AttentionMeta,
    tables_RB: Tensor,
    sinks_H: Tensor | None,
    options: dict,
    num_splits: int,
) -> None:
    (_, num_heads, size), num_rows = q_THD.shape, len(meta.num_keys)
    is_whole = num_splits == 1 and sinks_H is None
    part, lse = out_THD, out_THD
    if not is_whole:
        part = torch.empty(num_rows, num_heads, num_splits, size, dtype=torch.float32, device=q_THD.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q_THD.device)
    tiles = decode_tiles(q_THD.dtype, options["PADDED"])
    decode_kernel[(num_rows, caches[0].shape[1], num_splits)](
        q_THD,
        *caches,
        part,
        lse,
        meta.query_starts,
        meta.num_keys,
        tables_RB,
        GROUP_PADDED=max(tiles.rows, next_power_of_2(options["GROUP"])),
        SPLIT=SPLIT_TOKENS,
        TILE=tiles.keys,
        IS_WHOLE=is_whole,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if not is_whole:
        merge_kernel[(num_rows, num_heads)](
            part,
            lse,
            lse if sinks_H is None else sinks_H,
            meta.query_starts,
            out_THD,
            num_splits,
            NUM_HEADS=num_heads,
            SIZE=size,
            PADDED=options["PADDED"],
            TILE=_MERGE_SPLITS,
            HAS_SINKS=sinks_H is not None,
        )


def _num_splits(num_keys: int, limit: int) -> int:
    """Splits that the keys of any single query can lie in: of all its keys, or of the `limit` last ones."""
    of_all = -(-num_keys // SPLIT_TOKENS)
    return of_all if limit >= num_keys else min(of_all, (limit + SPLIT_TOKENS - 2) // SPLIT_TOKENS + 1)


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
    """As reference.qkv_norm_rope_write; of tokens whose slot is below 0 nothing is stored."""
    if k_cache_BKPD.shape != v_cache_BKPD.shape:
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
    (num_tokens, num_columns), (_, num_kv_heads, block_size, size) = qkv_TC.shape, k_cache_BKPD.shape
    num_heads = num_columns // size - 2 * num_kv_heads
    q_THD = torch.empty(num_tokens, num_heads, size, dtype=qkv_TC.dtype, device=qkv_TC.device)
    if num_tokens == 0:
        return q_THD
    padded = next_power_of_2(size)
    rows = max(1, min(_PROGRAM_ELEMENTS // padded, next_power_of_2(num_heads + 2 * num_kv_heads)))
    qkv_norm_rope_write_kernel[(num_tokens, -(-(num_heads + 2 * num_kv_heads) // rows))](
        qkv_TC,
        qkv_TC if q_norm_D is None else q_norm_D.contiguous(),
        qkv_TC if k_norm_D is None else k_norm_D.contiguous(),
        cos_TD.contiguous(),
        sin_TD.contiguous(),
        slots_T.contiguous(),
        q_THD,
        k_cache_BKPD,
        v_cache_BKPD,
        eps,
        qkv_TC.stride(0),
        *_strides(k_cache_BKPD),
        *_strides(v_cache_BKPD),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        ROTARY=cos_TD.shape[1],
        BLOCK_SIZE=block_size,
        HAS_Q_NORM=q_norm_D is not None,
        HAS_K_NORM=k_norm_D is not None,
        IS_CENTERED=zero_centered,
        ROWS=rows,
        PADDED=padded,
    )
    return q_THD


def copy_blocks(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, *, copies: Sequence[tuple[int, int, int]]) -> None:
    """As reference.copy_blocks: copies of which none reads what another one writes run at once."""
    for wave in _waves(copies):
        table = torch.tensor(wave, dtype=torch.int64, device=k_cache_BKPD.device)
        for cache_BKPD in (k_cache_BKPD, v_cache_BKPD):
            _, num_heads, block_size, size = cache_BKPD.shape
            if size == 0:
                continue
            copy_kernel[(len(wave), num_heads)](
                cache_BKPD,
                table,
                *_strides(cache_BKPD),
                SIZE=size,
                BLOCK_SIZE=block_size,
                SLOTS=next_power_of_2(block_size),
                PADDED=next_power_of_2(size),
            )


def _waves(copies: Sequence[tuple[int, int, int]]) -> list[list[tuple[int, int, int]]]:
    """The copies in order, a new list whenever one touches a block that the list before writes or reads."""
    waves: list[list[tuple[int, int, int]]] = []
    sources: set[int] = set()
    targets: set[int] = set()
    for source, target, num_slots in copies:
        if not waves or source in targets or target in targets or target in sources:
            waves.append([])
            sources, targets = set(), set()
        waves[-1].append((source, target, num_slots))
        sources.add(source)
        targets.add(target)
    return waves


def _strides(cache_BKPD: Tensor) -> tuple[int, int, int]:
    assert cache_BKPD.stride(3) == 1, f"elements of a head lie {cache_BKPD.stride(3)} apart, must be side by side"
    block, head, slot, _ = cache_BKPD.stride()
    return block, head, slot


def _named_strides(q_THD: Tensor, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor) -> dict[str, int]:
    strides = (*q_THD.stride()[:2], *_strides(k_cache_BKPD), *_strides(v_cache_BKPD))
    names = ("q_T", "q_H", "k_B", "k_K", "k_P", "v_B", "v_K", "v_P")
    return {f"stride_{name}": stride for name, stride in zip(names, strides, strict=True)}
