"""Long-context evaluation: `evaluate(llm, tasks, lengths) -> Report`. See docs/EVALS.md."""

from typing import TYPE_CHECKING, Any

__all__ = ["FAMILIES", "TASKS", "Report", "Task", "Texts", "TruncatedError", "evaluate", "read_report", "write_page"]

if TYPE_CHECKING:
    from hybrid_engine.evals.page import write_page
    from hybrid_engine.evals.report import Report, read_report
    from hybrid_engine.evals.run import TruncatedError, evaluate
    from hybrid_engine.evals.tasks import FAMILIES, TASKS
    from hybrid_engine.evals.tasks.base import Task
    from hybrid_engine.evals.texts import Texts

_HOME = {
    "FAMILIES": "tasks",
    "TASKS": "tasks",
    "Report": "report",
    "Task": "tasks.base",
    "Texts": "texts",
    "TruncatedError": "run",
    "evaluate": "run",
    "read_report": "report",
    "write_page": "page",
}


def __getattr__(name: str) -> Any:
    # Loaded on first use: the command line lists its commands without torch.
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"hybrid_engine.evals.{_HOME[name]}"), name)
