"""The GPU's ops in the shapes of real models: one table for compiling them and for comparing them with references."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hybrid_engine.bench.gpu_attention_work import Heads, make_attention
from hybrid_engine.bench.gpu_work import (
    Scan,
    Work,
    make_activation,
    make_conv,
    make_copies,
    make_delta,
    make_exact_linear,
    make_gated_norm,
    make_mamba1,
    make_mamba2,
    make_norm,
    make_qkv,
    make_rope,
    make_write,
)

BOTH = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Case:
    """An op in one shape."""

    name: str
    make: Callable[[torch.device, torch.dtype], Work]
    dtypes: tuple[torch.dtype, ...] = BOTH
    has_wgmma: bool = False
    """In bfloat16 for Hopper its matrix products must be Hopper's own."""


HEADS = (
    Heads("gemma3 4b, sliding", 8, 4, 256, window=1024),
    Heads("granite 4 h", 32, 8, 128),
    Heads("gemma2, soft-capped", 8, 4, 256, softcap=50.0),
    Heads("llama 4, chunked", 40, 8, 128, chunk=1024),
    Heads("gpt-oss, sinks", 64, 8, 64, window=128, has_sinks=True),
    Heads("heads of 96", 12, 12, 96),
    Heads("mimo v2, smaller values", 64, 4, 192, value_size=128),
    Heads("gemma 4, full", 8, 2, 512),
    Heads("kimi linear, latents", 32, 1, 576, value_size=512, is_latent=True),
    Heads("deepseek v3, latents", 128, 1, 576, value_size=512, is_latent=True),
)


SCANS = (Scan("granite 4 h 7b", 128, 64, 128), Scan("odd sizes", 6, 20, 40, groups=2))
DELTAS = (
    (Scan("qwen 3 next", 32, 128, 128, groups=16), False),
    (Scan("olmo hybrid", 30, 192, 96, groups=30), False),
    (Scan("kimi linear", 32, 128, 128, groups=32), True),
)
"""Delta rules, and whether each row of a state has a decay of its own."""


def cases() -> Iterator[Case]:
    """All of them."""
    for heads in HEADS:
        # In float32 one of them: its products of three parts take long to compile.
        dtypes = BOTH if heads.name == "granite 4 h" else (torch.bfloat16,)
        yield Case(f"decode, {heads.name}", _bind(make_attention, heads, [1, 1, 1], [1, 300, 4000]), dtypes)
        mixed = _bind(make_attention, heads, [300, 1, 77, 0, 2], [300, 900, 1400, 9, 1300])
        yield Case(f"prefill, {heads.name}", mixed, dtypes, has_wgmma=heads.size <= 256)
    for heads in (HEADS[1], Heads("gemma3 4b, full", 8, 4, 256), HEADS[6], HEADS[7]):
        dtypes = BOTH if heads.name == "granite 4 h" else (torch.bfloat16,)
        shared = _bind(make_attention, heads, [1] * 16, [4096 + 60 + i for i in range(16)], 256)
        yield Case(f"decode, a shared prefix, {heads.name}", shared, dtypes, has_wgmma=heads.size <= 256)
    for size, value_size, rotary in ((256, 256, 256), (96, 96, 48), (64, 64, 0), (192, 128, 64)):
        qkv = _bind(make_qkv, 8, 4, (size, value_size), rotary)
        yield Case(f"split, norm, turn, write: heads of {size}", qkv)
    yield Case("write keys and values", make_write)
    yield Case("copy blocks", make_copies)
    for width in (640, 4096):
        yield Case(f"norm of {width}", _bind(make_norm, width))
    for kind in ("gelu_tanh", "silu"):
        yield Case(f"{kind} of 2560", _bind(make_activation, 2560, kind))
    yield Case("rope of 128", _bind(make_rope, 32, 8, 128))
    for num_queries in ([37, 1, 0, 90], [1, 1, 1]):
        many = len(num_queries) == 4
        kind = "prefill" if many else "decode"
        captures = [(0, 5, 9), (3, 64, 10), (3, 90, 11)] if many else [(1, 1, 9)]
        yield Case(f"convolution, {kind}", _bind(make_conv, 8448, num_queries, captures))
        yield Case(f"mamba 1, {kind}", _bind(make_mamba1, 8192, 16, num_queries, captures))
        for scan, kinds in zip(SCANS, (BOTH, BOTH[:1]), strict=True):
            yield Case(f"mamba 2, {kind}, {scan.name}", _bind(make_mamba2, scan, num_queries, captures), kinds)
        for scan, is_by_row in DELTAS:
            work = _bind(make_delta, scan, is_by_row, num_queries, captures)
            yield Case(f"delta rule, {kind}, {scan.name}", work, BOTH if scan == DELTAS[0][0] else BOTH[:1])
    requests = ([37, 1, 0, 90], [(0, 5, 9), (3, 64, 10)])
    yield Case("exact mamba 2", _bind(make_mamba2, SCANS[0], *requests, is_exact=True), BOTH[:1])
    for scan, is_by_row in (DELTAS[0], DELTAS[2]):
        yield Case(
            f"exact delta rule, {scan.name}", _bind(make_delta, scan, is_by_row, *requests, is_exact=True), BOTH[:1]
        )
    yield Case("exact linear", _bind(make_exact_linear, 70, 2560, 2048))
    yield Case("gated norm in groups", _bind(make_gated_norm, 4096, 1024))


def _bind(function: Callable[..., Work], *args: object, **options: object) -> Callable[..., Work]:
    return lambda device, dtype: function(device, dtype, *args, **options)
