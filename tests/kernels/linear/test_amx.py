"""Linear layers by AMX: the machine code itself, on processors without AMX through an emulator of its instructions."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_engine.kernels import linear
from hybrid_engine.kernels.native import builder

HERE = Path(__file__).parent
EMULATOR = HERE.parents[1] / "support" / "amx_emulator.cpp"
SOURCE = Path(str(linear.__file__)).with_name("cpu.cpp")
AMX = "native -mamx-tile -mamx-bf16 -mamx-int8"

pytestmark = pytest.mark.skipif("x86" not in os.uname().machine, reason="AMX is x86-64's")


def compile_or_skip(*arguments):
    """Run the compiler; skip the test where it is too old for AMX, or missing."""
    compiler = builder.find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler here")
    known = subprocess.run([compiler, "-mamx-bf16", "-E", "-xc++", "-"], input=b"", capture_output=True, check=False)
    if known.returncode:
        pytest.skip("this compiler doesn't know AMX")
    subprocess.run([compiler, *map(str, arguments)], check=True)


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """What LD_PRELOAD has to name."""
    if "avx512_vnni" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("what surrounds AMX takes AVX-512, which this processor doesn't have")
    path = tmp_path_factory.mktemp("amx") / "emulator.so"
    compile_or_skip("-std=c++17", "-O2", "-march=native", "-shared", "-fPIC", EMULATOR, "-o", path, "-ldl")
    return path


@pytest.fixture
def library(emulator, monkeypatch):
    """The library built for AMX, proven by its self-test in the emulator."""
    monkeypatch.setenv("LD_PRELOAD", str(emulator))
    monkeypatch.setenv("HYBRID_ENGINE_MARCH", AMX)
    path = builder.build(SOURCE)
    assert path is not None
    return path


@pytest.mark.usefixtures("library")
def test_all_that_holds_for_linear_layers_holds_by_amx():
    files = [HERE / name for name in ("by_amx.py", "test_linear.py", "test_int8.py", "test_screen.py")]
    quietly = ("-q", "-x", "-p", "no:faulthandler", "-p", "no:cacheprovider")  # that plugin would take its signals
    command = [sys.executable, "-m", "pytest", *quietly, "-k", "native or by_amx", *files]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_a_process_that_is_refused_amx_does_without(library, monkeypatch):
    monkeypatch.setenv("AMX_EMULATOR", "refuses")
    builder._probe(library)


def test_a_processor_that_dies_of_what_it_announced_is_found_out(library, monkeypatch):
    monkeypatch.setenv("AMX_EMULATOR", "dies")
    with pytest.raises(builder.BuildError, match="self-test ended with -4"):
        builder._probe(library)


def test_it_is_compiled_for_the_processors_that_have_it(tmp_path):
    headers = Path(builder.__file__).parent
    flags = (*builder._FLAGS, "-O1", "-march=sapphirerapids", f"-I{headers}", "-save-temps=obj")
    compile_or_skip(*flags, "-c", SOURCE, "-o", tmp_path / "made.o")
    (assembler,) = tmp_path.glob("*.s")
    for instruction in ("tdpbf16ps", "tdpbusd", "ldtilecfg", "tilerelease"):
        assert instruction in assembler.read_text()
