"""Budgets of size. A function that one must scroll, or a file that one must search, is two.

`size_allow_list.json` names the files that are over the limit, how long each is, and why. It may only shrink: an entry
that a file no longer needs, or that is looser than the file, fails.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from statistics import median, quantiles

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("hybrid_engine", "kernels", "models")
MAX_FILE_LINES = 400
MAX_TRITON_FILE_LINES = 450
MAX_TRITON_FUNCTION_LINES = 120
ALLOWED = json.loads((ROOT / "tests" / "size_allow_list.json").read_text())

BOOKKEEPING = [
    *sorted((ROOT / "hybrid_engine" / "groups").glob("*.py")),
    *sorted((ROOT / "hybrid_engine" / "eviction").glob("*.py")),
    *(
        ROOT / "hybrid_engine" / f"{name}.py"
        for name in (
            "admission",
            "checkpoint_recorder",
            "coordinator",
            "drafting",
            "explanation",
            "external_loads",
            "holders",
            "plan",
            "progress",
            "prefix_lookup",
            "request",
            "scheduler",
            "step_builder",
            "step_plan",
            "waiting_queue",
        )
    ),
]


def source_files() -> list[Path]:
    patterns = ("*.py", "*.cpp", "*.h")
    found = {path.resolve() for name in SOURCES for pattern in patterns for path in (ROOT / name).rglob(pattern)}
    return sorted(found)


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def max_lines(path: Path) -> int:
    return MAX_TRITON_FILE_LINES if path.name.startswith("triton_") else MAX_FILE_LINES


def function_lines(path: Path) -> list[int]:
    """Return the lines of each function; its docstring is for callers and does not count."""
    lengths = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            docstring = node.body[0] if ast.get_docstring(node) else None
            num_docstring = docstring.end_lineno - docstring.lineno + 1 if docstring else 0
            lengths.append(node.end_lineno - node.lineno + 1 - num_docstring)
    return lengths


FILES = source_files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_can_be_read_in_one_sitting(path: Path) -> None:
    entry = ALLOWED.get(str(path.relative_to(ROOT)))
    limit = entry["num_lines"] if entry else max_lines(path)
    assert num_lines(path) <= limit, "split it, or give a reason in tests/size_allow_list.json"


@pytest.mark.parametrize("name", sorted(ALLOWED))
def test_an_exception_is_still_needed_and_no_larger_than_needed(name: str) -> None:
    path = ROOT / name
    assert path.exists(), "the file is gone: remove its entry"
    assert num_lines(path) > max_lines(path), "the file is within the limit: remove its entry"
    assert num_lines(path) == ALLOWED[name]["num_lines"], "the file has shrunk: lower its entry"
    assert ALLOWED[name]["reason"], "an exception has a reason"


def test_functions_of_the_bookkeeping_are_short() -> None:
    lengths = [length for path in BOOKKEEPING for length in function_lines(path)]
    assert median(lengths) <= 10
    assert quantiles(lengths, n=10)[-1] <= 35


@pytest.mark.parametrize("path", [p for p in FILES if p.name.startswith("triton_")] or [None], ids=str)
def test_a_triton_kernel_fits_on_two_screens(path: Path | None) -> None:
    if path is None:
        pytest.skip("there are no Triton kernels yet")
    assert max(function_lines(path)) <= MAX_TRITON_FUNCTION_LINES
