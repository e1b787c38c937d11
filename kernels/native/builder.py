"""Compile one C++ source into a shared object, once for each source, compiler and processor."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_HEADERS = Path(__file__).parent
_FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-pthread", "-Wno-psabi")
_BUILD_SECONDS = 300
_PROBE_SECONDS = 60

_PROBE = """
import ctypes, sys
sys.exit(ctypes.CDLL(sys.argv[1]).self_test())
"""


class BuildError(Exception):
    """The compiler or the self-test said no, and would again. Never leaves build()."""


def build(source: Path) -> Path | None:
    """The shared object of a source, built if it isn't in the cache yet; None when it can't be had, logged once.

    A fresh object is loaded in a child process first and its self_test() run there: some virtual machines announce
    instructions that end a process. If it dies, a more modest target is tried, then None is the answer. What was
    refused where a modest one worked is not tried again; what only took too long is.
    """
    compiler = find_compiler()
    if compiler is None:
        _give_up(source, "no C++ compiler was found (CXX, c++, g++, clang++), or this isn't Linux")
        return None
    problems: list[str] = []
    refusals: dict[Path, str] = {}
    for target in _targets():
        path = _cache_folder() / f"{source.parent.name}-{_key(source, compiler, target)}.so"
        if path.exists():
            return path
        refusal = path.with_suffix(".refused")
        if refusal.exists():
            continue
        try:
            _build_and_publish(source, path, compiler, target)
        except BuildError as problem:
            refusals[refusal] = str(problem)
            problems.append(f"{target}: {problem}")
        except (OSError, subprocess.TimeoutExpired) as problem:
            problems.append(f"{target}: {problem}")
        else:
            # Only now is it sure that neither compiler nor disk is the problem.
            with suppress(OSError):
                for refused, reason in refusals.items():
                    refused.write_text(reason)
            return path
    _give_up(source, "; ".join(problems))
    return None


@cache
def find_compiler() -> str | None:
    """Path of a C++ compiler, or None; off Linux None as well, for threads wait as only Linux lets them."""
    if not sys.platform.startswith("linux"):
        return None
    names = (os.environ.get("CXX"), "c++", "g++", "clang++")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def _give_up(source: Path, why: str) -> None:
    logger.warning("%s runs on torch alone, which is slower: %s", source.parent.name, why)


def _targets() -> tuple[str, ...]:
    """What to try as -march, further flags after it, best first."""
    if chosen := os.environ.get("HYBRID_ENGINE_MARCH"):
        return (chosen,)
    if platform.machine() != "x86_64":
        return ("native",)
    without_amx = ("native -mno-amx-bf16",) if "amx_bf16" in _machine() else ()
    return ("native", *without_amx, "x86-64-v3")


def _cache_folder() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(root) / "hybrid-engine" / "native"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:  # a home that can't be written: this process builds for itself
        return _own_folder()
    return folder if os.access(folder, os.W_OK) else _own_folder()


@cache
def _own_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="hybrid-engine-"))


@cache
def _machine() -> str:
    """What -march=native depends on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    told = {line for line in lines if line.startswith(("flags", "Features", "model", "cpu family", "CPU part"))}
    return "\n".join(sorted(told))


@cache
def _compiler_version(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout


def _key(source: Path, compiler: str, target: str) -> str:
    """A name that changes whenever the object would."""
    digest = hashlib.sha256()
    for path in (source, *sorted(source.parent.glob("*.h")), *sorted(_HEADERS.glob("*.h"))):
        digest.update(path.read_bytes() + b"\0")
    for text in (_compiler_version(compiler), target, *_FLAGS, _machine()):
        digest.update(text.encode() + b"\0")
    return digest.hexdigest()[:24]


def _build_and_publish(source: Path, path: Path, compiler: str, target: str) -> None:
    """Compile, link, probe, then move into place at once: whoever finds the file finds it whole and proven."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made, linked = Path(folder, "made.o"), Path(folder, "linked.so")
        _run([compiler, *_FLAGS, *f"-march={target}".split(), f"-I{_HEADERS}", "-c", str(source), "-o", str(made)])
        _run([compiler, "-shared", "-pthread", str(made), "-o", str(linked)])
        _probe(linked)
        linked.replace(path)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False)
    if done.returncode:
        raise BuildError(f"{Path(command[0]).name} failed: {done.stderr.strip()[-2000:]}")


def _probe(library: Path) -> None:
    command = [sys.executable, "-c", _PROBE, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    if done.returncode == -signal.SIGKILL:
        raise OSError("the built library's self-test was killed: there may be too little memory just now")
    if done.returncode:
        raise BuildError(f"the built library's self-test ended with {done.returncode} {done.stderr.strip()[-500:]}")
