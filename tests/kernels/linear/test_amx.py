"""Linear layers by AMX."""

from pathlib import Path

import pytest
from amx import compile_or_skip, needs_amx, needs_x86, run_tests

from hybrid_engine.kernels import linear
from hybrid_engine.kernels.native import builder

HERE = Path(__file__).parent
SOURCE = Path(str(linear.__file__)).with_name("cpu.cpp")

pytestmark = needs_x86


@pytest.fixture
def library(emulated_amx):
    """The library built for AMX, proven by its self-test in the emulator."""
    path = builder.build(SOURCE)
    assert path is not None
    return path


@pytest.mark.usefixtures("library")
def test_sums_by_amx_are_those_that_are_written():
    run_tests([HERE / "by_amx.py"], "by_amx")


@needs_amx
def test_a_processor_that_has_it_computes_as_the_emulator(monkeypatch):
    monkeypatch.delenv("HYBRID_ENGINE_MARCH", raising=False)
    assert builder.build(SOURCE) is not None
    run_tests([HERE / "by_amx.py"], "by_amx")


@pytest.mark.slow
@pytest.mark.usefixtures("library")
def test_all_that_holds_for_linear_layers_holds_by_amx():
    run_tests([HERE / name for name in ("test_linear.py", "test_int8.py", "test_screen.py")], "native")


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
