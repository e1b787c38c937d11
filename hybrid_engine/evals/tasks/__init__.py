"""All tasks by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.evals.tasks.perplexity import Perplexity
from hybrid_engine.evals.tasks.reasoning import REASONING_TASKS
from hybrid_engine.evals.tasks.retrieval import NeedleMap, Passkey, Recall
from hybrid_engine.evals.tasks.ruler_needles import NEEDLE_TASKS
from hybrid_engine.evals.tasks.ruler_others import OTHER_TASKS

TASKS: dict[str, Task] = {
    task.name: task
    for task in (*NEEDLE_TASKS, *OTHER_TASKS, NeedleMap(), Passkey(), Recall(), *REASONING_TASKS, Perplexity())
}
FAMILIES: dict[str, tuple[str, ...]] = {
    "ruler": tuple(task.name for task in (*NEEDLE_TASKS, *OTHER_TASKS)),
    "facts": ("facts_1", "facts_2", "facts_3"),
    "hops": ("hops_1", "hops_2", "hops_3", "hops_4"),
    "all": tuple(TASKS),
}
"""Names that stand for several tasks."""


def find_tasks(wanted: Sequence[str | Task]) -> list[Task]:
    """Return the tasks of some names, each once. Raises ConfigError for a name that doesn't exist, or for none."""
    found: dict[str, Task] = {}
    for each in wanted:
        if isinstance(each, Task):
            found[each.name] = each
            continue
        if each not in TASKS and each not in FAMILIES:
            near = difflib.get_close_matches(str(each), [*TASKS, *FAMILIES], n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join([*TASKS, *FAMILIES])}"
            raise ConfigError(f"{each!r} is no task; {hint}")
        found |= {name: TASKS[name] for name in FAMILIES.get(each, (each,))}
    if not found:
        raise ConfigError(f"tasks is empty: give some of {', '.join([*TASKS, *FAMILIES])}")
    return list(found.values())
