"""What is stored into the blocks, on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.attention.triton_write import copy_kernel, qkv_norm_rope_write_kernel, write_kernel

_PROGRAM_ELEMENTS = 4096


def write_kv(k_TKD: Tensor, v_TKD: Tensor, *, k_cache_BKPD: Tensor, v_cache_BKPD: Tensor, slots_T: Tensor) -> None:
    """As reference.write_kv; tokens whose slot is below 0 are passed over."""
    (num_tokens, num_heads, size), value_size = k_TKD.shape, v_TKD.shape[2]
    if k_TKD.numel() == 0:
        return
    write_kernel[(num_tokens,)](
        k_TKD,
        v_TKD,
        k_cache_BKPD,
        v_cache_BKPD,
        slots_T.contiguous(),
        *k_TKD.stride(),
        *v_TKD.stride(),
        *cache_strides(k_cache_BKPD),
        *cache_strides(v_cache_BKPD),
        NUM_HEADS=num_heads,
        SIZE=size,
        V_SIZE=value_size,
        BLOCK_SIZE=k_cache_BKPD.shape[2],
        HEADS=next_power_of_2(num_heads),
        PADDED=next_power_of_2(max(size, value_size)),
    )


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
    if qkv_TC.stride(1) != 1:
        qkv_TC = qkv_TC.contiguous()
    (num_tokens, num_columns), (_, num_kv_heads, block_size, size) = qkv_TC.shape, k_cache_BKPD.shape
    value_size = v_cache_BKPD.shape[3]
    num_heads = (num_columns - num_kv_heads * value_size) // size - num_kv_heads
    q_THD = torch.empty(num_tokens, num_heads, size, dtype=qkv_TC.dtype, device=qkv_TC.device)
    if num_tokens == 0:
        return q_THD
    padded = next_power_of_2(max(size, value_size))
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
        *cache_strides(k_cache_BKPD),
        *cache_strides(v_cache_BKPD),
        HEADS=num_heads,
        KV_HEADS=num_kv_heads,
        SIZE=size,
        V_SIZE=value_size,
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
                *cache_strides(cache_BKPD),
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


def cache_strides(cache_BKPD: Tensor) -> tuple[int, int, int]:
    """Of blocks, heads and slots."""
    assert cache_BKPD.stride(3) == 1, f"elements of a head lie {cache_BKPD.stride(3)} apart, must be side by side"
    block, head, slot, _ = cache_BKPD.stride()
    return block, head, slot
