"""What the GPU suite times, and how large it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from hybrid_engine.bench.gpu_attention_work import Heads, make_attention
from hybrid_engine.bench.gpu_cases import DELTAS, EXPERTS, Case, bind
from hybrid_engine.bench.gpu_products import ExpertShape, make_draw, make_fp8_linear, make_moe
from hybrid_engine.bench.gpu_work import (
    Scan,
    Work,
    make_activation,
    make_conv,
    make_delta,
    make_mamba1,
    make_mamba2,
    make_qkv_of,
)

Make = Callable[[torch.device, torch.dtype], Work]
Timed = tuple[str, Make, float | None]
"""A name, the work, the share of its floor that it should reach."""


@dataclass(frozen=True)
class Size:
    """How large all is that the suite runs."""

    copied_bytes: int
    matrix_size: int
    divisor: int
    """Tokens and inner widths are divided by it: 1 but for trying the suite out."""
    is_checked: Callable[[Case], bool]
    """Which cases are compared with their references."""

    def of(self, number: int, *, at_least: int = 1) -> int:
        """A number of tokens or columns of the real suite, in this size."""
        return max(at_least, number // self.divisor)


FULL = Size(copied_bytes=4 << 30, matrix_size=8192, divisor=1, is_checked=lambda case: True)


def timed_works(size: Size) -> Iterator[Timed]:
    """All of them."""
    yield from _attention(size)
    yield from _recurrent(size)
    yield from _products(size)
    tokens, vocab_size = size.of(8192), size.of(262_144, at_least=64)
    for num_rows in (1, 64):
        yield f"draw from 262,144, {num_rows} requests", bind(make_draw, size.of(num_rows), vocab_size), None
    yield "gelu * up, 8,192 tokens", bind(make_activation, 10_240, "gelu_tanh", tokens), 0.7
    yield "split, norm, turn, write, 8,192 tokens", bind(make_qkv_of, 8, 4, (256, 256), 256, tokens), 0.5


def _attention(size: Size) -> Iterator[Timed]:
    for heads in (Heads("granite 4 h", 32, 8, 128), Heads("gemma3 4b", 8, 4, 256)):
        for num_requests, num_keys in ((1, 32_768), (16, 4096), (64, 4096)):
            rows = size.of(num_requests)
            work = bind(make_attention, heads, [1] * rows, [size.of(num_keys)] * rows)
            yield f"decode, {heads.name}, {num_requests} x {num_keys:,} keys", work, 0.8
        for num_requests in (16, 64):
            rows, num_shared = size.of(num_requests, at_least=2), size.of(8192, at_least=64)
            work = bind(make_attention, heads, [1] * rows, [num_shared + 64] * rows, num_shared // 16)
            yield f"decode, {heads.name}, {num_requests} that share 8,192 keys", work, None
        for num_requests, num_tokens in ((1, 8192), (4, 2048)):
            lengths = [size.of(num_tokens)] * size.of(num_requests)
            work = bind(make_attention, heads, lengths, lengths)
            yield f"prefill, {heads.name}, {num_requests} x {num_tokens:,} tokens", work, None
    window = Heads("gemma3 4b, window of 1,024", 8, 4, 256, window=size.of(1024))
    lengths = [size.of(8192)]
    yield "prefill, gemma3 4b, sliding, 8,192 tokens", bind(make_attention, window, lengths, lengths), None


def _recurrent(size: Size) -> Iterator[Timed]:
    scan = Scan("granite 4 h 7b", size.of(128, at_least=4), 64, 128)
    tokens = size.of(8192, at_least=32)
    for num_requests in (1, 16, 64):
        goal = 0.8 if num_requests > 1 else None
        rows = size.of(num_requests)
        yield f"mamba 2 update, {num_requests} requests", bind(make_mamba2, scan, [1] * rows, []), goal
    for chunk in (64, 128):
        work = bind(make_mamba2, scan, [tokens], [], chunk=chunk)
        yield f"mamba 2 scan, 8,192 tokens, pieces of {chunk}", work, None
    kept = [(0, tokens // 16 * (i + 1), 2 + i) for i in range(15)]
    yield "mamba 2 scan, 8,192 tokens, 15 states kept", bind(make_mamba2, scan, [tokens], kept), None
    delta = DELTAS[0][0]
    yield "delta rule, qwen 3 next, 8,192 tokens", bind(make_delta, delta, False, [tokens], []), None
    rows = size.of(64)
    yield "delta rule update, qwen 3 next, 64 requests", bind(make_delta, delta, False, [1] * rows, []), None
    channels = size.of(8192, at_least=32)
    yield "mamba 1 scan, 2,048 tokens", bind(make_mamba1, channels, 16, [size.of(2048)], []), None
    yield "convolution, 8,192 tokens", bind(make_conv, size.of(8448, at_least=32), [tokens], []), 0.7


def _products(size: Size) -> Iterator[Timed]:
    full = EXPERTS[0]
    columns = size.of(full.width, at_least=32), size.of(full.inner, at_least=32)
    experts = ExpertShape(full.name, size.of(full.num_experts, at_least=8), full.num_chosen, *columns)
    for quantization in (None, "fp8"):
        kept = "" if quantization is None else " in fp8"
        for num_tokens in (1, 16, 64, 2048, 8192):
            goal = 0.6 if num_tokens in (16, 64) else None
            work = bind(make_moe, experts, size.of(num_tokens), quantization)
            yield f"experts{kept}, {full.name}, {num_tokens:,} tokens", work, goal
    outputs, inputs = size.of(20_480, at_least=32), size.of(2560, at_least=32)
    for num_tokens in (1, 16, 64, 2048):
        work = bind(make_fp8_linear, outputs, inputs, size.of(num_tokens))
        yield f"linear in fp8, 20,480 x 2,560, {num_tokens:,} tokens", work, 0.7 if num_tokens <= 16 else None
