"""Attention over blocks on a GPU: one launch for requests of several queries, one and a merge for those of one.

Heads too large for any tile go through torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.attention import fallback
from hybrid_engine.kernels.attention.gpu_write import cache_strides, copy_blocks, qkv_norm_rope_write, write_kv
from hybrid_engine.kernels.attention.meta import AttentionMeta
from hybrid_engine.kernels.attention.shared import SHARED_UNIT, TILE_MEMBERS, SharedKeys
from hybrid_engine.kernels.attention.triton_decode import decode_kernel, merge_kernel
from hybrid_engine.kernels.attention.triton_prefill import prefill_kernel
from hybrid_engine.kernels.attention.triton_shared import shared_kernel
from hybrid_engine.kernels.triton_math import dot_precision

__all__ = ["attention", "copy_blocks", "has_kernels", "most_shared_queries", "qkv_norm_rope_write", "write_kv"]

_MAX_VALUE_SIZE = 512
_MAX_HEAD_SIZE = _MAX_VALUE_SIZE + 128
"""A key of more elements than a value can have is taken in two parts: latents, and what heads share beside them."""
SPLIT_TOKENS = 256
"""Keys of one split in decoding: fixed, so that a request's result doesn't depend on its neighbours."""
_MERGE_SPLITS = 16
_UNLIMITED = 1 << 30
"""Stands for no window and no chunk; positions stay below it."""
_MIN_DOT = 16


@dataclass(frozen=True)
class Tiles:
    """How a kernel cuts its work, by the head size and dtype."""

    rows: int
    """Rows of queries and heads in a tile; at least one token's."""
    keys: int
    num_warps: int
    num_stages: int


def prefill_tiles(dtype: torch.dtype, size_padded: int, rest: int = 0) -> Tiles:
    """The table of prefill: large tiles, smaller ones where float32 takes three products for one."""
    if dtype == torch.float32:
        return Tiles(rows=16, keys=32 if size_padded <= 128 else 16, num_warps=8, num_stages=1)
    if rest:
        # Latents and what heads share beside them: 32 keys need 100 KiB of shared memory, 99 are there on sm_89.
        return Tiles(rows=32, keys=16, num_warps=8, num_stages=1)
    # One stage: Hopper's pipelined products with an operand out of registers are known to go wrong in some shapes, and
    # none was tried on a GPU yet.
    if size_padded <= 128:
        return Tiles(rows=128, keys=64, num_warps=8, num_stages=1)
    # 64 rows of 512 sums each, as Hopper's own products want them, don't fit into registers.
    return Tiles(rows=128 if size_padded <= 256 else 32, keys=32, num_warps=8, num_stages=1)


def decode_tiles(dtype: torch.dtype, size_padded: int) -> Tiles:
    """The table of decode, whose rows are the heads of a group."""
    if dtype == torch.float32 or size_padded > 256:
        return Tiles(rows=_MIN_DOT, keys=16 if size_padded > 128 else 32, num_warps=8, num_stages=1)
    return Tiles(rows=_MIN_DOT, keys=64 if size_padded <= 128 else 32, num_warps=4, num_stages=3)


def shared_tiles(dtype: torch.dtype, size_padded: int) -> Tiles:
    """The table of decode over shared keys, whose rows are the heads of several requests."""
    if dtype == torch.float32:
        return prefill_tiles(dtype, size_padded)
    if size_padded <= 128:
        return Tiles(rows=64, keys=64, num_warps=4, num_stages=1)
    return Tiles(rows=64 if size_padded <= 256 else 32, keys=16, num_warps=8, num_stages=1)


def has_kernels(head_size: int, value_size: int) -> bool:
    """Whether the kernels take heads of these sizes."""
    return head_size <= _MAX_HEAD_SIZE and 0 < value_size <= _MAX_VALUE_SIZE


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
    if not has_kernels(k_cache_BKPD.shape[3], v_cache_BKPD.shape[3]):
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
    num_tokens, num_heads, _ = q_THD.shape
    out_THD = q_THD.new_empty(num_tokens, num_heads, v_cache_BKPD.shape[3])
    if out_THD.numel() == 0:
        return out_THD
    tables_RB = meta.block_tables_RB if meta.block_tables_RB.stride(1) == 1 else meta.block_tables_RB.contiguous()
    limits = {"window": window or _UNLIMITED, "chunk": chunk or _UNLIMITED}
    options = {
        "scale": scale,
        "softcap": softcap or 0.0,
        "stride_table": tables_RB.stride(0),
        "GROUP": num_heads // k_cache_BKPD.shape[1],
        "BLOCK_SIZE": k_cache_BKPD.shape[2],
        "HAS_CAP": softcap is not None,
        "PRECISION": dot_precision(q_THD.dtype),
        **_head_sizes(k_cache_BKPD, v_cache_BKPD),
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
    tiles = prefill_tiles(q_THD.dtype, _largest(options), options["REST"])
    num_programs, heads = _cut_group(options["GROUP"], tiles.rows)
    queries = max(1, tiles.rows // heads)
    prefill_kernel[(num_tokens // queries + num_rows, caches[0].shape[1] * num_programs)](
        q_THD,
        *caches,
        q_THD if sinks_H is None else sinks_H,
        out_THD,
        meta.query_starts,
        meta.num_keys,
        tables_RB,
        num_rows,
        HEADS=heads,
        QUERIES=queries,
        ROWS=max(_MIN_DOT, next_power_of_2(queries * heads)),
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
    (_, num_heads, size), num_rows = out_THD.shape, len(meta.num_keys)
    is_whole = num_splits == 1 and sinks_H is None
    members = _members_of_program(q_THD.dtype, _largest(options), options["GROUP"])
    shared = None if is_whole or members < 2 else meta.shared
    part, lse = out_THD, out_THD
    if not is_whole:
        part = torch.empty(num_rows, num_heads, num_splits, size, dtype=torch.float32, device=q_THD.device)
        lse = torch.empty(num_rows, num_heads, num_splits, dtype=torch.float32, device=q_THD.device)
    tiles = decode_tiles(q_THD.dtype, _largest(options))
    num_programs, heads = _cut_group(options["GROUP"], 64 if _largest(options) <= 256 else 32)
    decode_kernel[(num_rows, caches[0].shape[1] * num_programs, num_splits)](
        q_THD,
        *caches,
        part,
        lse,
        meta.query_starts,
        meta.num_keys,
        tables_RB,
        meta.num_keys if shared is None else shared.spans_R2,
        HEADS=heads,
        ROWS=max(tiles.rows, next_power_of_2(heads)),
        SPLIT=SPLIT_TOKENS,
        TILE=tiles.keys,
        HAS_SHARED=shared is not None,
        IS_WHOLE=is_whole,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )
    if shared is not None:
        _decode_shared(q_THD, caches, (part, lse), meta, tables_RB, shared, members, options)
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
            PADDED=options["V_PADDED"],
            TILE=_MERGE_SPLITS,
            HAS_SINKS=sinks_H is not None,
        )


def _decode_shared(
    q_THD: Tensor,
    caches: tuple[Tensor, Tensor],
    parts: tuple[Tensor, Tensor],
    meta: AttentionMeta,
    tables_RB: Tensor,
    shared: SharedKeys,
    members: int,
    options: dict,
) -> None:
    assert SHARED_UNIT % SPLIT_TOKENS == 0, (SHARED_UNIT, SPLIT_TOKENS)
    tiles = shared_tiles(q_THD.dtype, _largest(options))
    num_programs = len(shared.tiles_XC) * -(-TILE_MEMBERS // members)
    most_splits = -(-meta.extent.most_keys_of_single_queries // SPLIT_TOKENS)
    shared_kernel[(num_programs, caches[0].shape[1], most_splits)](
        q_THD,
        *caches,
        *parts,
        meta.query_starts,
        meta.num_keys,
        tables_RB,
        shared.tiles_XC,
        parts[1].shape[2],
        MEMBERS=members,
        TILE_MEMBERS=TILE_MEMBERS,
        ROWS=max(_MIN_DOT, next_power_of_2(members * options["GROUP"])),
        SPLIT=SPLIT_TOKENS,
        TILE=tiles.keys,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **options,
    )


def _members_of_program(dtype: torch.dtype, size_padded: int, heads_per_kv: int) -> int:
    """Requests whose heads are the rows of one program."""
    return min(TILE_MEMBERS, shared_tiles(dtype, size_padded).rows // heads_per_kv)


def most_shared_queries(heads_per_kv: int, head_size: int) -> int:
    """One: others are prefill's."""
    return int(_members_of_program(torch.bfloat16, next_power_of_2(head_size), heads_per_kv) > 1)


def _num_splits(num_keys: int, limit: int) -> int:
    """Splits that the keys of any single query can lie in: of all its keys, or of the `limit` last ones."""
    of_all = -(-num_keys // SPLIT_TOKENS)
    return of_all if limit >= num_keys else min(of_all, (limit + SPLIT_TOKENS - 2) // SPLIT_TOKENS + 1)


def _head_sizes(k_cache_BKPD: Tensor, v_cache_BKPD: Tensor) -> dict[str, int | bool]:
    """What tiles the kernels take heads in: of a key PADDED elements and REST more, of a value V_PADDED."""
    size, value_size = k_cache_BKPD.shape[3], v_cache_BKPD.shape[3]
    padded, value_padded = (max(_MIN_DOT, next_power_of_2(each)) for each in (size, value_size))
    is_part = v_cache_BKPD.untyped_storage() is k_cache_BKPD.untyped_storage()
    is_part &= v_cache_BKPD.storage_offset() == k_cache_BKPD.storage_offset()
    is_part &= v_cache_BKPD.stride() == k_cache_BKPD.stride()
    rest = 0
    if size > _MAX_VALUE_SIZE:
        padded, rest = _MAX_VALUE_SIZE, max(_MIN_DOT, next_power_of_2(size - _MAX_VALUE_SIZE))
    return {
        "SIZE": size,
        "PADDED": padded,
        "REST": rest,
        "V_SIZE": value_size,
        "V_PADDED": value_padded,
        "IS_V_IN_K": is_part and padded == value_padded,
    }


def _largest(options: dict) -> int:
    return max(options["PADDED"], options["V_PADDED"])


def _cut_group(group: int, most_rows: int) -> tuple[int, int]:
    """Programs among which the heads of a kv head are cut, and how many each has."""
    num_programs = -(-group // most_rows)
    return num_programs, -(-group // num_programs)


def _named_strides(q_THD: Tensor, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor) -> dict[str, int]:
    strides = (*q_THD.stride()[:2], *cache_strides(k_cache_BKPD), *cache_strides(v_cache_BKPD))
    names = ("q_T", "q_H", "k_B", "k_K", "k_P", "v_B", "v_K", "v_P")
    return {f"stride_{name}": stride for name, stride in zip(names, strides, strict=True)}
