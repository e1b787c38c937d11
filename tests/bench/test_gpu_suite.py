"""The GPU suite where no GPU is: all of it runs, small and in Triton's interpreter, before it ever meets one."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.bench import gpu
from hybrid_engine.bench.gpu_cases import Case
from hybrid_engine.bench.gpu_timed import Size, timed_works
from hybrid_engine.kernels.linear import QUANTIZATIONS

SMALL_CASES = ("copy blocks",)
SMALL = Size(
    copied_bytes=1 << 16,
    matrix_size=32,
    divisor=512,
    is_checked=lambda case: any(name in case.name for name in SMALL_CASES),
)
CPU = torch.device("cpu")


@pytest.fixture
def small(interpreted, monkeypatch):
    monkeypatch.setitem(QUANTIZATIONS, "fp8", "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("small")
def test_everything_that_is_timed_runs_and_so_does_every_peer_that_is_here():
    reports = list(gpu.run_on(CPU, SMALL))
    names = [figure.name for figure in reports[2].figures]
    assert [name for name, _, _ in timed_works(SMALL)] == [name for name in names if not name.startswith("  ")]
    for peer in ("torch's grouped product", "one expert after the other", "cuBLAS", "flex_attention"):
        assert any(peer in name for name in names), f"{peer} did not run: {reports[2].notes}"
    assert all(figure.median > 0 for report in reports[1:] for figure in report.figures)
    assert any("no varlen_attn here" in note for note in reports[2].notes), reports[2].notes


@pytest.mark.usefixtures("small")
def test_cases_are_compared_in_memory_full_of_nan():
    report = gpu.check_all(CPU, SMALL)
    assert [figure.goal.partition(": ")[2] for figure in report.figures] == ["met", "met"]
    with gpu.new_memory_full_of_nan():
        assert torch.empty(3).isnan().all()


@pytest.mark.usefixtures("small")
def test_a_wrong_result_is_named(monkeypatch):
    work = gpu.Work(lambda: torch.ones(3), lambda: torch.full((3,), torch.nan))
    monkeypatch.setattr(gpu, "cases", lambda: [Case("copy blocks of nothing", lambda device, dtype: work)])
    assert "  WRONG: copy blocks of nothing" in [figure.name for figure in gpu.check_all(CPU, SMALL).figures]


def test_a_peer_that_is_not_here_is_told_in_the_notes(monkeypatch):
    def missing():
        raise ImportError("No module named 'fla'")

    work = gpu.Work(lambda: None, num_bytes=1.0, peers={"FLA": missing})
    monkeypatch.setattr(gpu, "timed_works", lambda size: [("a scan", lambda device, dtype: work, None)])
    report = gpu.time_ops(CPU, gpu.Ceilings(1.0, 1.0), SMALL)
    assert report.notes[1:] == ("a scan: no FLA here: ImportError: No module named 'fla'",)
