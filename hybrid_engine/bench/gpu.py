"""The whole GPU suite: every case against its reference, ops against their floors and peers, decoding of large models.

Floors are what this machine's memory and matrix units reach in the same run: a large copy, a large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

import torch

from hybrid_engine.bench.gpu_cases import cases
from hybrid_engine.bench.gpu_models import DecodeSpeed, decode_speeds
from hybrid_engine.bench.gpu_peers import UNAVAILABLE
from hybrid_engine.bench.gpu_timed import FULL, Size, timed_works
from hybrid_engine.bench.gpu_work import Work
from hybrid_engine.bench.report import Figure, Report

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Norm of the difference over the norm. float32: sums in another order; bfloat16: results have 8 bits."""


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
    """Check, time, decode. with_models: also the large models, which take some minutes and 80 GB."""
    yield from run_on(torch.device("cuda"), FULL)
    if with_models:
        ceilings = measure_ceilings(torch.device("cuda"), FULL)
        for speeds in decode_speeds(torch.device("cuda")):
            yield decode_report(speeds, ceilings)


def run_on(device: torch.device, size: Size) -> Iterator[Report]:
    """Check and time the ops."""
    with torch.inference_mode():
        yield check_all(device, size)
        ceilings = measure_ceilings(device, size)
        yield _ceilings_report(device, ceilings, size)
        yield time_ops(device, ceilings, size)


def check_all(device: torch.device, size: Size) -> Report:
    """Compare every case with its reference; the largest errors, and whatever is too large."""
    figures: list[Figure] = []
    for dtype, limit in LARGEST_ERROR.items():
        errors: dict[str, float] = {}
        for case in cases():
            if dtype in case.dtypes and size.is_checked(case):
                torch.manual_seed(0)
                with new_memory_full_of_nan():
                    errors[case.name] = _error(case.make(device, dtype))
        wrong = {name: error for name, error in errors.items() if not error < limit}  # a NaN is wrong too
        name = str(dtype).removeprefix("torch.")
        figures.append(Figure(f"{name}: largest error of {len(errors)} cases", "", (max(errors.values()),), limit))
        figures += [Figure(f"  WRONG: {case}", "", (error,), limit) for case, error in wrong.items()]
    notes = ("norm of the difference / norm; new memory is full of NaN",)
    return Report("GPU ops beside their references", tuple(figures), notes)


@contextmanager
def new_memory_full_of_nan() -> Iterator[None]:
    """Have torch fill what it allocates, so that what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # only then does it fill
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


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


def measure_ceilings(device: torch.device, size: Size) -> Ceilings:
    """Time a large copy and a large product, on random data."""
    source = torch.randn(size.copied_bytes // 4, device=device)
    target = torch.empty_like(source)
    copy_seconds = _seconds(lambda: target.copy_(source))
    a, b = (torch.randn(size.matrix_size, size.matrix_size, device=device).bfloat16() for _ in range(2))
    product_seconds = _seconds(lambda: a @ b)
    return Ceilings(2 * size.copied_bytes / copy_seconds, 2 * size.matrix_size**3 / product_seconds)


def _ceilings_report(device: torch.device, ceilings: Ceilings, size: Size) -> Report:
    figures = (
        Figure("copy, read and written", "TB/s", (ceilings.bytes_per_second / 1e12,)),
        Figure(f"product of bfloat16 matrices of {size.matrix_size}", "TFLOP/s", (ceilings.flops / 1e12,)),
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return Report("GPU ceilings", figures, (f"{name}, torch {torch.__version__}",))


def time_ops(device: torch.device, ceilings: Ceilings, size: Size) -> Report:
    """Time each work, its share of the floor, and its peers."""
    figures: list[Figure] = []
    notes = ["bfloat16; the caches of the GPU are emptied before each call; medians"]
    for name, make, at_least in timed_works(size):
        work = make(device, torch.bfloat16)
        seconds = _seconds(work.run)
        share = ceilings.floor_seconds(work) / seconds
        figures.append(Figure(name, "µs", (seconds * 1e6,)))
        figures.append(Figure("  floor / time", "x", (share,), at_least=at_least))
        for peer, make_peer in work.peers.items():
            try:
                peer_seconds = _seconds(make_peer())
            except UNAVAILABLE as error:
                first_line = (str(error).splitlines() or [""])[0]
                notes.append(f"{name}: no {peer} here: {type(error).__name__}: {first_line}")
            else:
                figures.append(Figure(f"  time of {peer} / ours", "x", (peer_seconds / seconds,)))
    return Report("GPU ops", tuple(figures), tuple(notes))


def _seconds(call: Callable[[], object]) -> float:
    """Return the median time of a call on the GPU; elsewhere, where the suite is only tried out, that of one call."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    from triton.testing import do_bench

    return median(do_bench(call, warmup=20, rep=60, return_mode="all")) / 1e3


def decode_report(speeds: DecodeSpeed, ceilings: Ceilings) -> Report:
    """A table of one model's decode steps."""
    figures: list[Figure] = []
    for num_requests, step in speeds.steps.items():
        # A step reads every weight once; a copy moves each byte twice, so reading alone can be no faster than this.
        floor = step.read_bytes / ceilings.bytes_per_second
        figures.append(Figure(f"{num_requests} requests", "ms a step", (step.seconds * 1e3,)))
        figures.append(Figure("  reading the weights once / step", "x", (floor / step.seconds,)))
        figures.append(Figure("  of the step the GPU waits", "%", (100 * step.idle_share,), at_most=5))
        if step.peer_seconds is not None:
            figures.append(Figure("  step of transformers generate / ours", "x", (step.peer_seconds / step.seconds,)))
    note = f"random weights, {speeds.weight_bytes / 1e9:.1f} GB; {speeds.note}"
    return Report(f"GPU decoding, {speeds.name}", tuple(figures), (note,))
