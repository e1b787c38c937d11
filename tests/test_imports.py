"""Who may import whom, held over the syntax trees of the whole project."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ("hybrid_engine", "kernels", "models")
PUBLIC = {
    "hybrid_engine",
    *(
        f"hybrid_engine.{name}"
        for name in (
            "LLM",
            "RequestOutput",
            "SamplingParams",
            "SpeculativeConfig",
            "StructuredOutputsParams",
            "__version__",
        )
    ),
}

# For every part, the parts of ours that it may import besides itself. Arrows point one way: down this table is up the
# house. A new part needs a line here; a line that grows wants a reason in the commit.
PLAIN = {"errors", "config", "sampling_params", "step_plan", "transfer_plan", "explanation"}
BOOKKEEPING = PLAIN | {
    "groups",
    "eviction",
    "request",
    "prefix_lookup",
    "coordinator",
    "scheduler",
    "plan",
    "invariants",
}
API = {"", "config", "errors", "llm", "outputs", "sampling_params", "scoring", "startup", "stream"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "recent": set(),
    "config": {"errors", "groups.spec"},
    "sampling_params": {"errors"},
    "options": set(),
    "explanation": set(),
    "transfer_plan": set(),
    "step_plan": {"sampling_params", "transfer_plan"},
    "groups": {"errors", "recent", "step_plan"},
    "eviction": {"groups"},
    "request": {"explanation", "groups", "sampling_params", "step_plan"},
    "waiting_queue": {"config", "request"},
    "prefix_lookup": {"explanation", "groups", "request"},
    "checkpoint_recorder": {"config", "groups", "prefix_lookup", "request", "step_plan"},
    "pins": {"errors", "groups", "prefix_lookup"},
    "pinning": {"pins", "request", "sampling_params", "scheduler"},
    "coordinator": {
        "checkpoint_recorder",
        "config",
        "errors",
        "eviction",
        "explanation",
        "groups",
        "pins",
        "prefix_lookup",
        "request",
    },
    "connectors": {
        "config",
        "coordinator",
        "errors",
        "groups",
        "prefix_lookup",
        "request",
        "step_plan",
        "transfer_plan",
    },
    "drafting": {"config", "request", "step_plan"},
    "external_loads": {"connectors.base", "coordinator", "request", "step_plan"},
    "admission": {
        "config",
        "connectors.base",
        "coordinator",
        "explanation",
        "groups",
        "prefix_lookup",
        "request",
        "step_plan",
    },
    "plan": {"coordinator", "errors", "groups"},
    "invariants": {"coordinator", "groups", "request"},
    "holders": {"config", "coordinator", "request", "step_plan", "waiting_queue"},
    "progress": {"coordinator", "request"},
    "step_builder": {"checkpoint_recorder", "config", "groups", "request", "step_plan"},
    "scheduler": {
        "admission",
        "config",
        "connectors.base",
        "coordinator",
        "drafting",
        "external_loads",
        "holders",
        "progress",
        "request",
        "step_builder",
        "step_plan",
        "waiting_queue",
    },
    "kernels": {"errors"},
    "weights": {"errors"},
    "models": {"errors", "groups.spec", "kernels", "weights"},
    "structured": {"errors", "sampling_params"},
    "runner": {
        "errors",
        "groups.layout",
        "groups.spec",
        "kernels",
        "models",
        "sampling_params",
        "step_plan",
        "structured",
        "transfer_plan",
    },
    "tokenizer": {"errors", "weights"},
    "detokenizer": {"errors"},
    "outputs": {"explanation", "step_plan"},
    "in_flight": {"detokenizer", "outputs", "request", "sampling_params", "scheduler", "step_plan"},
    "step_pipeline": {"step_plan"},
    "engine": {
        "connectors.tiered",
        "detokenizer",
        "errors",
        "in_flight",
        "inputs",
        "outputs",
        "request",
        "sampling_params",
        "scheduler",
        "step_pipeline",
        "step_plan",
        "structured",
    },
    # Its draft model is an engine of its own, given to it ready to run.
    "speculation": {"drafting", "request", "sampling_params", "scheduler", "step_pipeline", "step_plan"},
    "startup": BOOKKEEPING
    | {
        "connectors",
        "detokenizer",
        "drafting",
        "engine",
        "exactness",
        "kernels.dispatch",
        "kernels.linear",
        "models",
        "runner",
        "speculation",
    }
    | {"structured", "tiny_hybrid", "tokenizer", "weights"},
    "exactness": {"errors", "kernels", "models"},
    "inputs": {"errors", "sampling_params"},
    "stream": {"outputs"},
    "interrupts": set(),
    "message_boundaries": {"recent"},
    "scoring": {"errors", "inputs", "outputs", "sampling_params"},
    "turns": {"engine"},
    "progress_bar": set(),
    "llm": {
        "progress_bar",
        "turns",
        "chat_template",
        "connectors.tiered",
        "engine",
        "errors",
        "inputs",
        "interrupts",
        "models.base",
        "outputs",
        "pinning",
        "plan",
        "sampling_params",
        "scoring",
        "startup",
        "stream",
        "tiny_hybrid",
    },
    "tiny_hybrid": {"config"},
    "async_engine": {"engine", "errors", "outputs", "startup", "tiny_hybrid"},
    "snapshot": {"engine", "groups"},
    "chat_template": {"errors", "message_boundaries"},
    "": {"config", "llm", "outputs", "sampling_params"},
    "prefill_worker": API,
    "disaggregated": API | {"inputs"},
    "chat": API,
    "report": API | {"explanation", "groups.spec", "models.base", "plan"},
    "families": {"groups.spec", "models"},
    "demo": API | {"report"},
    "server": API
    | {
        "async_engine",
        "chat_template",
        "engine",
        "explanation",
        "options",
        "pinning",
        "report",
        "snapshot",
        "tiny_hybrid",
    },
    "evals": API | {"groups.spec", "options", "report"},
    # Its subject is the bookkeeping and the kernels themselves; engines it meets through the public API alone.
    # Large models with random weights have no checkpoint, so it puts them together itself.
    "bench": API
    | BOOKKEEPING
    | {
        "step_builder",
        "step_pipeline",
        "demo",
        "kernels",
        "message_boundaries",
        "models",
        "options",
        "runner",
        "tokenizer",
        "weights",
    }
    # A prefix benchmark with real weights puts its answers into the runner, which no public API lets it do.
    | {"tiny_hybrid"},
    "cli": API | {"bench", "chat", "demo", "evals", "families", "options", "report", "server", "tiny_hybrid"},
}
SCHEDULING = {"admission", "drafting", "external_loads", "holders", "progress", "step_builder", "waiting_queue"}
TORCH_FREE = (*sorted(BOOKKEEPING | SCHEDULING), "inputs")
HEAVY = {"torch", "transformers", "triton", "safetensors", "gguf"}


def python_files() -> list[Path]:
    """Return every source file once, not again through the links in hybrid_engine/."""
    return sorted({path.resolve() for source in SOURCES for path in (ROOT / source).rglob("*.py")})


def module_name(path: Path) -> str:
    """Return the dotted name below hybrid_engine: '' for the package itself, 'kernels.norm.cpu' for a kernel."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    parts = parts[1:] if parts[0] == "hybrid_engine" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imports_of(path: Path) -> list[str]:
    return list(imports(ast.parse(path.read_text())))


def our_imports_of(path: Path) -> list[str]:
    """Return what a file imports of ours, below hybrid_engine; '' for what the package itself offers."""
    ours = [name for name in imports_of(path) if part_of(name) == "hybrid_engine"]
    return ["" if name in PUBLIC else name.removeprefix("hybrid_engine.") for name in ours]


def is_within(name: str, part: str) -> bool:
    return name == part or name.startswith(f"{part}.")


def part_of(module: str) -> str:
    return module.partition(".")[0]


FILES = python_files()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_imports_only_what_its_part_may(path: Path) -> None:
    part = part_of(module_name(path))
    assert part in MAY_IMPORT, f"{part!r} is a new part: give it a line in MAY_IMPORT"
    allowed = MAY_IMPORT[part] | {part}
    wrong = [name for name in our_imports_of(path) if not any(is_within(name, other) for other in allowed)]
    assert not wrong, f"{part or 'hybrid_engine'} may not import {wrong}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_kernels_and_models_are_never_imported_by_their_bare_names(path: Path) -> None:
    assert not [name for name in imports_of(path) if part_of(name) in ("kernels", "models")]


@pytest.mark.parametrize("part", TORCH_FREE)
def test_the_bookkeeping_imports_nothing_that_knows_tensors(part: str) -> None:
    files = [path for path in FILES if part_of(module_name(path)) == part]
    assert files, f"there is no {part}"
    heavy = [(path.name, name) for path in files for name in imports_of(path) if part_of(name) in HEAVY]
    assert not heavy


def test_no_part_reaches_itself_through_others() -> None:
    seen: list[str] = []
    waiting = {part: {part_of(other) for other in others} - {part} for part, others in MAY_IMPORT.items()}
    while ready := [part for part, others in waiting.items() if others <= set(seen)]:
        seen += ready
        waiting = {part: others for part, others in waiting.items() if part not in seen}
    assert not waiting, f"these import each other in a circle: {sorted(waiting)}"


@pytest.mark.parametrize("module", ["scheduler", "plan", "invariants", "config", "errors", "connectors.tiered"])
def test_the_bookkeeping_runs_where_torch_is_not_loaded(module: str) -> None:
    check = f"import hybrid_engine.{module}, sys; assert not {{'torch', 'transformers'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=ROOT)
