"""Building C++ on first use: once, proven, beside torch's own threads, and never needed."""

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hybrid_engine.kernels.native import builder
from hybrid_engine.kernels.native.builder import build, find_compiler

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler here")

GOOD = 'extern "C" int self_test() { return 0; }\n'
BAD_ANSWER = 'extern "C" int self_test() { return 3; }\n'
ILLEGAL = 'extern "C" int self_test() { __builtin_trap(); }\n'


@pytest.fixture
def source(tmp_path, monkeypatch):
    """Writes a source beside an empty cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "op" / "cpu.cpp"
    path.parent.mkdir()

    def write(text):
        path.write_text(text)
        return path

    return write


def run_python(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@needs_compiler
def test_a_source_is_compiled_once(source, monkeypatch):
    path = build(source(GOOD))
    assert path is not None
    monkeypatch.setattr(builder, "_build_and_publish", lambda *_: pytest.fail("compiled again"))
    assert build(source(GOOD)) == path


@needs_compiler
def test_a_changed_source_is_another_object(source):
    assert build(source(GOOD)) != build(source(GOOD + "// changed\n"))


@needs_compiler
def test_a_changed_header_beside_it_is_another_object(source):
    path = source(GOOD)
    first = build(path)
    path.with_name("part.h").write_text("// new\n")
    assert build(path) != first


@needs_compiler
@pytest.mark.parametrize("text", [BAD_ANSWER, ILLEGAL, "not C++"], ids=["wrong", "illegal_instruction", "no_compile"])
def test_what_fails_its_self_test_is_never_used(source, caplog, tmp_path, text):
    with caplog.at_level(logging.WARNING):
        assert build(source(text)) is None
    assert "op runs on torch alone" in caplog.text
    assert not list((tmp_path / "cache").rglob("*.so"))


@needs_compiler
def test_a_target_that_dies_gives_way_to_a_modest_one(source, monkeypatch):
    monkeypatch.setattr(builder, "_targets", lambda: ("no-such-processor", "native"))
    assert build(source(GOOD)) is not None


@needs_compiler
def test_a_target_that_was_refused_is_not_tried_again(source, monkeypatch):
    monkeypatch.setattr(builder, "_targets", lambda: ("no-such-processor", "native"))
    path = build(source(GOOD))
    monkeypatch.setattr(builder, "_build_and_publish", lambda *_: pytest.fail("compiled again"))
    assert build(source(GOOD)) == path


@needs_compiler
def test_where_nothing_could_be_built_everything_is_tried_again(source, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(builder, "_FLAGS", (*builder._FLAGS, "-fno-such-flag"))  # as on a full disk: no target works
        patch.setattr(builder, "_key", lambda *_: "same")
        assert build(source(GOOD)) is None
    monkeypatch.setattr(builder, "_key", lambda *_: "same")
    assert build(source(GOOD)) is not None


@needs_compiler
@pytest.mark.parametrize("limit", ["_BUILD_SECONDS", "_PROBE_SECONDS"])
def test_a_target_that_only_took_too_long_is_tried_again(source, monkeypatch, limit):
    monkeypatch.setattr(builder, "_targets", lambda: ("native",))
    with monkeypatch.context() as patch:
        patch.setattr(builder, limit, 1e-3)
        assert build(source(GOOD)) is None
    assert build(source(GOOD)) is not None


@needs_compiler
def test_a_target_may_bring_flags(source, monkeypatch):
    monkeypatch.setenv("HYBRID_ENGINE_MARCH", "native -DANSWER=0")
    path = build(source('extern "C" int self_test() { return ANSWER; }\n'))
    monkeypatch.setenv("HYBRID_ENGINE_MARCH", "native -DANSWER=-0")
    assert path is not None
    assert build(source('extern "C" int self_test() { return ANSWER; }\n')) not in (None, path)


@pytest.mark.parametrize(
    ("flags", "targets"),
    [("avx512f", ("native", "x86-64-v3")), ("amx_tile amx_bf16", ("native", "native -mno-amx-bf16", "x86-64-v3"))],
)
def test_a_processor_that_announces_amx_may_do_without(monkeypatch, flags, targets):
    monkeypatch.delenv("HYBRID_ENGINE_MARCH", raising=False)
    monkeypatch.setattr(builder.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(builder, "_machine", lambda: f"flags : {flags}")
    assert builder._targets() == targets


def test_without_a_compiler_the_reason_is_logged(source, monkeypatch, caplog):
    monkeypatch.setattr(builder, "find_compiler", lambda: None)
    with caplog.at_level(logging.WARNING):
        assert build(source(GOOD)) is None
    assert "no C++ compiler was found" in caplog.text


@needs_compiler
def test_a_home_that_cannot_be_written_is_no_obstacle(source, tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocker))
    path = build(source(GOOD))
    assert path is not None
    assert ctypes.CDLL(str(path)).self_test() == 0


def test_the_environment_can_turn_all_of_it_off():
    code = "from hybrid_engine.kernels.native import prepare; print(any(prepare().values()))"
    assert run_python(code, HYBRID_ENGINE_NATIVE="0") == "False"


@needs_compiler
def test_all_libraries_share_one_team_of_threads():
    code = """
import os
import torch
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.kernels.norm import rms_norm
from hybrid_engine.kernels.activation import act
weight, x, ones = torch.zeros(1024, 1024).bfloat16(), torch.zeros(64, 1024).bfloat16(), torch.ones(1024)
torch.set_num_threads(4)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
packed = PackedLinear.pack(weight)
between = count()
for _ in range(3):
    linear(x, packed), rms_norm(x, ones, eps=1e-6), act(x, kind="silu")
print(between - before, count() - between)
"""
    assert run_python(code, OMP_NUM_THREADS="1") == "3 0"


@needs_compiler
def test_few_products_wake_no_thread():
    code = """
import os
import torch
from hybrid_engine.kernels.linear import PackedLinear, linear
small, large = (PackedLinear.pack(torch.zeros(size, size)) for size in (512, 1024))
torch.set_num_threads(4)
count = lambda: len(os.listdir("/proc/self/task"))
before = count()
linear(torch.zeros(1, 512), small)
between = count()
linear(torch.zeros(1, 1024), large)
print(between - before, count() - between)
"""
    assert run_python(code, OMP_NUM_THREADS="1") == "0 3"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("target", ["x86-64-v4", "x86-64-v3", "x86-64"])
def test_plainer_processors_get_the_same_answers(target):
    if "x86" not in os.uname().machine:
        pytest.skip("targets of another architecture")
    if target == "x86-64-v4" and "avx512dq" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX-512")
    tests = Path(__file__).parents[1]
    chosen = [str(tests / folder) for folder in ("activation", "attention", "linear", "norm", "rope")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-k", "native", *chosen],
        env={**os.environ, "HYBRID_ENGINE_MARCH": target},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:]
