"""The machine code for AMX: by processors that have it, and by an emulator of its instructions on any other."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from hybrid_engine.kernels.native import builder

SOURCE = Path(__file__).with_name("amx_emulator.cpp")
TARGET = "native -mamx-tile -mamx-bf16 -mamx-int8"

needs_x86 = pytest.mark.skipif("x86" not in os.uname().machine, reason="AMX is x86-64's")
needs_amx = pytest.mark.skipif("amx_bf16" not in Path("/proc/cpuinfo").read_text(), reason="no AMX in this processor")


def compile_or_skip(*arguments: object) -> None:
    """Run the compiler; skip the test where it is too old for AMX, or missing."""
    compiler = builder.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    known = subprocess.run([compiler, "-mamx-bf16", "-E", "-xc++", "-"], input=b"", capture_output=True, check=False)
    if known.returncode:
        pytest.skip("this compiler doesn't know AMX")
    subprocess.run([compiler, *map(str, arguments)], check=True)


@pytest.fixture(scope="session")
def amx_emulator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What LD_PRELOAD has to name."""
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("what surrounds AMX takes AVX-512, which this processor doesn't have")
    path = tmp_path_factory.mktemp("amx") / "emulator.so"
    compile_or_skip("-std=c++17", "-O2", "-march=native", "-shared", "-fPIC", SOURCE, "-o", path, "-ldl")
    return path


@pytest.fixture
def emulated_amx(amx_emulator: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a test starts compute by AMX, in the emulator."""
    monkeypatch.setenv("LD_PRELOAD", str(amx_emulator))
    monkeypatch.setenv("HYBRID_ENGINE_MARCH", TARGET)


def run_tests(files: Sequence[Path], keyword: str) -> None:
    """Run tests in a process of their own; all must pass."""
    quietly = ("-q", "-x", "-p", "no:faulthandler", "-p", "no:cacheprovider")  # that plugin would take the signals
    command = [sys.executable, "-m", "pytest", *quietly, "-k", keyword, *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
