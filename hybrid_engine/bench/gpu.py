"""The whole GPU suite: every case against its reference, ops against their floors and peers, decoding of large models.

Floors are what this machine's memory and matrix units reach in the same run: a large copy, a large matrix product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch

from hybrid_engine.bench import gpu_work as works
from hybrid_engine.bench.gpu_attention_work import Heads, make_attention
from hybrid_engine.bench.gpu_cases import cases
from hybrid_engine.bench.gpu_models import DecodeSpeed, decode_speeds
from hybrid_engine.bench.gpu_work import Scan, Work
from hybrid_engine.bench.report import Figure, Report

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm. float32: sums in another order; bfloat16: results have 8 bits."""
COPIED_BYTES = 4 << 30
MATRIX_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """What the GPU reaches."""

    bytes_per_second: float
    """Of a copy, what is read and what is written counted."""
    flops: float
    """A second, of a product of bfloat16 matrices."""

    def floor_seconds(self, work: Work) -> float:
        """The least time that a work can take."""
        return max(work.num_bytes / self.bytes_per_second, work.num_flops / self.flops)


def run(*, with_models: bool = True) -> Iterator[Report]:
    """Check, time, decode. with_models: also the large models, which take some minutes and 40 GB."""
    device = torch.device("cuda")
    with torch.inference_mode():
        yield check_all(device)
        ceilings = measure_ceilings(device)
        yield _ceilings_report(ceilings)
        yield time_ops(device, ceilings)
    if with_models:
        for speeds in decode_speeds(device):
            yield _decode_report(speeds, ceilings)


def check_all(device: torch.device) -> Report:
    """Compare every case with its reference; the largest errors, and whatever is too large."""
    figures: list[Figure] = []
    for dtype, limit in LARGEST_ERROR.items():
        errors: dict[str, float] = {}
        for case in cases():
            torch.manual_seed(0)
            errors[case.name] = _error(case.make(device, dtype))
        wrong = {name: error for name, error in errors.items() if not error < limit}  # a NaN is wrong too
        name = str(dtype).removeprefix("torch.")
        figures.append(Figure(f"{name}: largest error of {len(errors)} cases", "", (max(errors.values()),), limit))
        figures += [Figure(f"  WRONG: {case}", "", (error,), limit) for case, error in wrong.items()]
    return Report("GPU ops beside their references", tuple(figures), ("norm of the difference / norm",))


def _error(work: Work) -> float:
    assert work.reference is not None
    got, wanted = work.run(), work.reference()
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) and isinstance(wanted, tuple) else [(got, wanted)]
    errors = []
    for ours, theirs in pairs:
        assert isinstance(ours, torch.Tensor), type(ours)
        assert isinstance(theirs, torch.Tensor), type(theirs)
        difference = (ours.double() - theirs.double()).norm() / theirs.double().norm()
        errors.append(float(difference.nan_to_num(torch.inf)))
    return max(errors)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Time a large copy and a large product, on random data."""
    source = torch.randn(COPIED_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy_seconds = _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, device=device).bfloat16() for _ in range(2))
    product_seconds = _seconds(lambda: a @ b)
    return Ceilings(2 * COPIED_BYTES / copy_seconds, 2 * MATRIX_SIZE**3 / product_seconds)


def _ceilings_report(ceilings: Ceilings) -> Report:
    figures = (
        Figure("copy, read and written", "TB/s", (ceilings.bytes_per_second / 1e12,)),
        Figure(f"product of bfloat16 matrices of {MATRIX_SIZE}", "TFLOP/s", (ceilings.flops / 1e12,)),
    )
    name = torch.cuda.get_device_name()
    return Report("GPU ceilings", figures, (f"{name}, torch {torch.__version__}",))


def timed_works(device: torch.device) -> Iterator[tuple[str, Work, float | None]]:
    """What is timed: a name, the work, the share of its floor that it should reach."""
    dtype = torch.bfloat16
    full, gemma = Heads("granite 4 h", 32, 8, 128), Heads("gemma3 4b", 8, 4, 256)
    for heads in (full, gemma):
        for num_requests, num_keys in ((1, 32_768), (16, 4096), (64, 4096)):
            lengths = [num_keys] * num_requests
            work = make_attention(device, dtype, heads, [1] * num_requests, lengths)
            yield f"decode, {heads.name}, {num_requests} x {num_keys:,} keys", work, 0.8
        for num_requests in (16, 64):
            work = make_attention(device, dtype, heads, [1] * num_requests, [8192 + 64] * num_requests, 8192 // 16)
            yield f"decode, {heads.name}, {num_requests} that share 8,192 keys", work, None
        for num_requests, num_queries in ((1, 8192), (4, 2048)):
            lengths = [num_queries] * num_requests
            work = make_attention(device, dtype, heads, lengths, lengths)
            yield f"prefill, {heads.name}, {num_requests} x {num_queries:,} tokens", work, None
    window = Heads("gemma3 4b, window of 1,024", 8, 4, 256, window=1024)
    yield "prefill, gemma3 4b, sliding, 8,192 tokens", make_attention(device, dtype, window, [8192], [8192]), None
    scan = Scan("granite 4 h 7b", 128, 64, 128)
    for num_requests in (1, 16, 64):
        work = works.make_mamba2(device, dtype, scan, [1] * num_requests, [])
        yield f"mamba 2 update, {num_requests} requests", work, 0.8 if num_requests > 1 else None
    for chunk in (64, 128):
        work = works.make_mamba2(device, dtype, scan, [8192], [], chunk=chunk)
        yield f"mamba 2 scan, 8,192 tokens, pieces of {chunk}", work, None
    kept = [(0, 512 * (i + 1), 2 + i) for i in range(15)]
    yield "mamba 2 scan, 8,192 tokens, 15 states kept", works.make_mamba2(device, dtype, scan, [8192], kept), None
    yield "mamba 1 scan, 2,048 tokens", works.make_mamba1(device, dtype, 8192, 16, [2048], []), None
    yield "convolution, 8,192 tokens", works.make_conv(device, dtype, 8448, [8192], []), 0.7
    yield "gelu * up, 8,192 tokens", works.make_activation(device, dtype, 10_240, "gelu_tanh", 8192), 0.7
    yield "split, norm, turn, write, 8,192 tokens", works.make_qkv_of(device, dtype, 8, 4, (256, 256), 256, 8192), 0.5


def time_ops(device: torch.device, ceilings: Ceilings) -> Report:
    """Time each work, its share of the floor, and its peers."""
    figures: list[Figure] = []
    for name, work, at_least in timed_works(device):
        seconds = _seconds(work.run)
        share = ceilings.floor_seconds(work) / seconds
        figures.append(Figure(name, "µs", (seconds * 1e6,)))
        figures.append(Figure("  floor / time", "x", (share,), at_least=at_least))
        for peer, call in work.peers.items():
            figures.append(Figure(f"  time of {peer} / ours", "x", (_seconds(call) / seconds,)))
    notes = ("bfloat16; the caches of the GPU are emptied before each call; medians",)
    return Report("GPU ops", tuple(figures), notes)


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU."""
    from triton.testing import do_bench

    return median(do_bench(call, warmup=20, rep=60, return_mode="all")) / 1e3


def _decode_report(speeds: DecodeSpeed, ceilings: Ceilings) -> Report:
    # A step reads every weight once; a copy moves each byte twice, so reading alone can be no faster than this.
    floor = speeds.weight_bytes / ceilings.bytes_per_second
    figures: list[Figure] = []
    for num_requests, step in speeds.steps.items():
        figures.append(Figure(f"{num_requests} requests", "ms a step", (step.seconds * 1e3,)))
        figures.append(Figure("  reading the weights once / step", "x", (floor / step.seconds,)))
        figures.append(Figure("  of the step the GPU waits", "%", (100 * step.idle_share,), at_most=5))
        if step.peer_seconds is not None:
            figures.append(Figure("  step of transformers generate / ours", "x", (step.peer_seconds / step.seconds,)))
    note = f"random weights, {speeds.weight_bytes / 1e9:.1f} GB in bfloat16; {speeds.note}"
    return Report(f"GPU decoding, {speeds.name}", tuple(figures), (note,))
