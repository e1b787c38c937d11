"""Long-context evaluation: `evaluate(llm, tasks, lengths) -> Report`. See docs/EVALS.md."""

from hybrid_engine.evals.page import write_page
from hybrid_engine.evals.report import Report, read_report
from hybrid_engine.evals.run import TruncatedError, evaluate
from hybrid_engine.evals.tasks import FAMILIES, TASKS
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.evals.texts import Texts

__all__ = ["FAMILIES", "TASKS", "Report", "Task", "Texts", "TruncatedError", "evaluate", "read_report", "write_page"]
