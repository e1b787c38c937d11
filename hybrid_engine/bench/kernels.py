"""The kernels beside torch's own operations, in the shapes of Gemma 3 270M, in bfloat16."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.kernels.attention import AttentionMeta, attention
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.linear.int8 import round_weight
from hybrid_engine.kernels.norm import rms_norm

MODEL_WIDTH, INNER_WIDTH, VOCAB_SIZE = 640, 2048, 262_144
NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 1, 256, 16
SECONDS_IN_ROUND = 0.1

Operation = Callable[[], object]
Case = tuple[str, Operation, dict[str, Operation]]
"""A name, our operation, and what it is compared with, by whose it is."""


def run(*, num_rounds: int = 5, num_threads: int | None = None) -> Iterator[Report]:
    """Time each kernel and torch's counterpart in turns."""
    torch.set_num_threads(num_threads or torch.get_num_threads())
    torch.manual_seed(0)
    shared_cases = [_shared_case(4, 1, 256), _shared_case(32, 8, 128), _shared_case(8, 8, 64)]
    cases = [*_linear_cases(), *_attention_cases(), *shared_cases, *_norm_cases()]
    threads = f"{torch.get_num_threads()} threads"
    with torch.inference_mode():
        figures = [figure for case in cases for figure in _figures(case, num_rounds)]
        note = f"bfloat16, {threads}; torch's attention gets its keys and values in one piece"
        yield Report("Kernels", tuple(figures), (note,))
        figures = [figure for case in _integer_cases() for figure in _figures(case, num_rounds)]
        note = f"inputs and results in bfloat16, {threads}; _int_mm neither rounds inputs nor scales results"
        yield Report("Linear weights in 8 bits", tuple(figures), (note,))


def _figures(case: Case, num_rounds: int) -> Iterator[Figure]:
    name, ours, peers = case
    times = [[_seconds(each) for each in (ours, *peers.values())] for _ in range(num_rounds)]
    yield Figure(name, "µs", tuple(mine * 1e6 for mine, *_ in times))
    for place, peer in enumerate(peers, start=1):
        yield Figure(f"  {peer} time / ours", "x", tuple(each[place] / each[0] for each in times))


def _seconds(operation: Operation) -> float:
    """Return the median time of one call, over as many as fit in a tenth of a second, and at least three."""
    operation()
    times: list[float] = []
    while len(times) < 3 or sum(times) < SECONDS_IN_ROUND:
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return median(times)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()


def _linear_cases() -> list[Case]:
    cases: list[Case] = []
    for title, num_outputs, sizes in (("gate and up", 2 * INNER_WIDTH, (1, 8, 512)), ("head", VOCAB_SIZE, (1, 8))):
        weight_NK = _random(num_outputs, MODEL_WIDTH)
        packed = PackedLinear.pack(weight_NK)
        for num_tokens in sizes:
            x_TK = _random(num_tokens, MODEL_WIDTH)
            name = f"linear {MODEL_WIDTH} to {num_outputs:,} ({title}), {num_tokens} tokens"
            cases.append((name, _bind(linear, x_TK, packed), {"torch's": _bind(F.linear, x_TK, weight_NK)}))
    return cases


def _integer_cases() -> Iterator[Case]:
    shapes = {"gate and up": (2 * INNER_WIDTH, MODEL_WIDTH), "down": (MODEL_WIDTH, INNER_WIDTH)}
    shapes["head"] = (VOCAB_SIZE, MODEL_WIDTH)
    for title, (num_outputs, num_inputs) in shapes.items():
        weight_NK = _random(num_outputs, num_inputs)
        whole, int8, w8a8 = (PackedLinear.pack(weight_NK, kind) for kind in (None, "int8", "w8a8"))
        integers_NK, scales_N = round_weight(weight_NK)
        for num_tokens in (1, 16) if title == "head" else (1, 4, 16, 512):
            x_TK = _random(num_tokens, num_inputs)
            integers_TK = torch.randint(-127, 128, x_TK.shape, dtype=torch.int8)
            plain = {"our bfloat16's": _bind(linear, x_TK, whole)}
            atens = {
                "torch._weight_int8pack_mm's": _bind(torch._weight_int8pack_mm, x_TK, integers_NK, scales_N.bfloat16())
            }
            name = f"{num_inputs:,} to {num_outputs:,} ({title}), {num_tokens} tokens"
            yield f"int8, {name}", _bind(linear, x_TK, int8), plain | atens
            product = {"torch._int_mm's": _bind(torch._int_mm, integers_TK, integers_NK.T)}
            yield f"w8a8, {name}", _bind(linear, x_TK, w8a8), plain | product


def _attention_cases() -> list[Case]:
    shapes = (("decode", 1, 1, 2048), ("decode", 8, 1, 576), ("prefill", 1, 512, 512))
    return [_attention_case(*shape) for shape in shapes]


def _attention_case(title: str, num_requests: int, num_queries: int, num_keys: int) -> Case:
    num_blocks = num_keys // BLOCK_SIZE
    cache_BKPD = [_random(num_requests * num_blocks + 1, NUM_KV_HEADS, BLOCK_SIZE, HEAD_SIZE) for _ in range(2)]
    tables = [[1 + request * num_blocks + i for i in range(num_blocks)] for request in range(num_requests)]
    meta = AttentionMeta.build(
        num_queries=[num_queries] * num_requests,
        num_keys=[num_keys] * num_requests,
        block_tables=tables,
        block_size=BLOCK_SIZE,
    )
    q_THD = _random(num_requests * num_queries, NUM_HEADS, HEAD_SIZE)
    scale = HEAD_SIZE**-0.5
    ours = _bind(attention, q_THD, k_cache_BKPD=cache_BKPD[0], v_cache_BKPD=cache_BKPD[1], meta=meta, scale=scale)
    # torch gets [request, head, token, head size].
    q = _random(num_requests, NUM_HEADS, num_queries, HEAD_SIZE)
    k, v = (_random(num_requests, NUM_KV_HEADS, num_keys, HEAD_SIZE) for _ in range(2))
    is_causal = num_queries > 1
    theirs = _bind(F.scaled_dot_product_attention, q, k, v, is_causal=is_causal, scale=scale, enable_gqa=True)
    return f"attention, {title}: {num_requests} x {num_queries} queries, {num_keys:,} keys", ours, {"torch's": theirs}


def _shared_case(num_heads: int, num_kv_heads: int, head_size: int) -> Case:
    """Requests whose tables begin with the same blocks, with and without reading those once for all."""
    num_requests, num_shared, num_own = 16, 4096 // BLOCK_SIZE, 8
    tables = [
        [*range(1, 1 + num_shared), *range(1 + num_shared + i * num_own, 1 + num_shared + (i + 1) * num_own)]
        for i in range(num_requests)
    ]
    meta = AttentionMeta.build(
        num_queries=[1] * num_requests,
        num_keys=[(num_shared + num_own) * BLOCK_SIZE] * num_requests,
        block_tables=tables,
        block_size=BLOCK_SIZE,
        is_shared=True,
    )
    shape = (num_shared + num_requests * num_own + 1, num_kv_heads, BLOCK_SIZE, head_size)
    caches = {"k_cache_BKPD": _random(*shape), "v_cache_BKPD": _random(*shape), "scale": head_size**-0.5}
    q_THD = _random(num_requests, num_heads, head_size)
    name = f"attention, decode: {num_requests} requests that share 4,096 keys, {num_heads} heads / {num_kv_heads}"
    ours = _bind(attention, q_THD, meta=meta, **caches)
    apart = _bind(attention, q_THD, meta=replace(meta, shared=None), **caches)
    return f"{name} x {head_size}", ours, {"each reading its own:": apart}


def _norm_cases() -> list[Case]:
    weight_E = _random(MODEL_WIDTH)
    cases: list[Case] = []
    for num_tokens in (1, 512):
        x_TE = _random(num_tokens, MODEL_WIDTH)
        theirs = _bind(F.rms_norm, x_TE, (MODEL_WIDTH,), weight_E, 1e-6)
        cases.append((f"rms norm, {num_tokens} tokens", _bind(rms_norm, x_TE, weight_E, eps=1e-6), {"torch's": theirs}))
    return cases


def _bind(function: Callable[..., object], *args: object, **kwargs: object) -> Operation:
    return lambda: function(*args, **kwargs)
