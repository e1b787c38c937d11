"""What an evaluation found: scores with intervals, a heat map, and what reuse saved."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.table import Table

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.journal import Journal, Record
from hybrid_engine.evals.metrics import bootstrap, interval
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.report import new_table

VERSION = 1


@dataclass(frozen=True)
class Score:
    """One task at one length."""

    task: str
    length: int
    num_samples: int
    metric: str
    """'score': 0 to 1, the more the better; 'perplexity': the less the better."""
    value: float
    low: float
    """Ends of the 95 % confidence interval."""
    high: float
    interval: str
    """How it was found: 'Wilson' or 'bootstrap'."""


@dataclass(frozen=True)
class Cell:
    """One task at one length and depth."""

    task: str
    length: int
    depth: float
    num_samples: int
    value: float


@dataclass(frozen=True)
class Work:
    """Tokens and seconds of the whole run."""

    prompt_tokens: int
    """Of all prompts: what was asked."""
    unique_tokens: int
    """The same, prefixes that prompts sent together share counted once."""
    computed_tokens: int
    """Prompt tokens that were not found in the prefix cache."""
    answer_tokens: int
    seconds: float
    """The model's time; making the samples isn't counted."""
    computed_without_reuse: int | None = None
    """None where the run was not compared with one that reads no cache."""
    seconds_without_reuse: float | None = None
    num_same_answers: int | None = None
    num_same_scores: int | None = None


@dataclass(frozen=True)
class Report:
    """The results of one model with one set of settings."""

    name: str
    settings: dict[str, Any]
    scores: tuple[Score, ...]
    cells: tuple[Cell, ...]
    work: Work
    num_samples: int
    num_resumed: int
    """Samples that an earlier, interrupted run had finished."""
    made: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    samples: tuple[Record, ...] = field(default=(), repr=False)
    """Each sample's answer, references, score and tokens; left out of a report that was read from a short file."""

    def score(self, task: str, length: int) -> Score:
        """Return one task's score at one length. Raises KeyError where there is none."""
        for score in self.scores:
            if (score.task, score.length) == (task, length):
                return score
        raise KeyError((task, length))

    def write_json(self, path: str | Path, *, with_samples: bool = True) -> None:
        """Write the report to a file that `read_report` reads."""
        content = {"version": VERSION, **asdict(self)}
        if not with_samples:
            content["samples"] = []
        Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def table(self) -> Table:
        """Return the scores as a table for the terminal."""
        table = new_table(f"{self.name}: scores with 95 % intervals", "task", *self._columns(), left=("task",))
        for task in dict.fromkeys(score.task for score in self.scores):
            found = {score.length: _cell(score) for score in self.scores if score.task == task}
            table.add_row(task, *(found.get(length, "-") for length in self.settings["lengths"]))
        return table

    def _columns(self) -> list[str]:
        return [f"{length:,}" for length in self.settings["lengths"]]

    def work_line(self) -> str:
        """Say in one line what was computed, and what reuse saved."""
        work = self.work
        line = (
            f"{self.num_samples:,} samples; prompts {work.prompt_tokens:,} tokens, {work.unique_tokens:,} unique, "
            f"{work.computed_tokens:,} computed; {work.seconds:,.1f} s"
        )
        if work.seconds_without_reuse is None:
            return line
        return (
            f"{line}; without reuse {work.computed_without_reuse:,} computed, {work.seconds_without_reuse:,.1f} s "
            f"({work.seconds_without_reuse / work.seconds:.1f} times as long); answers the same: "
            f"{work.num_same_answers:,} of {self.num_samples:,}"
        )


def _cell(score: Score) -> str:
    if score.metric == "score":
        return f"{100 * score.value:.0f} ({100 * score.low:.0f}-{100 * score.high:.0f})"
    return f"{score.value:.4g} ({score.low:.4g}-{score.high:.4g})"


def read_report(path: str | Path) -> Report:
    """Read a report that `write_json` wrote. Raises ConfigError for a file that isn't one."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        if content.pop("version") != VERSION:
            raise ConfigError(f"{path} was written by another version: make the report anew from its journal")
        content["scores"] = tuple(Score(**each) for each in content["scores"])
        content["cells"] = tuple(Cell(**each) for each in content["cells"])
        content["work"] = Work(**content["work"])
        content["samples"] = tuple(content["samples"])
        return Report(**content)
    except (OSError, UnicodeDecodeError, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} is no report of an evaluation: {error!r}") from error


def make_report(
    name: str, settings: Record, tasks: Sequence[Task], keys: dict[str, tuple[str, int]], journal: Journal
) -> Report:
    """Put the records of all samples together. keys: of the samples that belong to the run."""
    records = [journal.records[key] for key in keys]
    by_place: dict[tuple[str, int], list[Record]] = defaultdict(list)
    by_cell: dict[tuple[str, int, float], list[Record]] = defaultdict(list)
    for record in records:
        by_place[record["task"], record["length"]].append(record)
        if record["depth"] is not None:
            by_cell[record["task"], record["length"], record["depth"]].append(record)
    metrics = {task.name: task.metric_name for task in tasks}
    return Report(
        name=name,
        settings=settings,
        scores=tuple(_score(metrics[task], task, length, found) for (task, length), found in by_place.items()),
        cells=tuple(
            Cell(*place, len(found), math.fsum(record["score"] for record in found) / len(found))
            for place, found in sorted(by_cell.items())
        ),
        work=_work(records, settings["compares_without_reuse"]),
        num_samples=len(records),
        num_resumed=journal.num_found,
        samples=tuple(records),
    )


def _score(metric: str, task: str, length: int, records: Sequence[Record]) -> Score:
    if metric == "perplexity":
        values = [loss for record in records for loss in record["pieces"]]
        found = bootstrap(values)
        transform: Callable[[float], float] = math.exp
    else:
        values = [record["score"] for record in records]
        found = interval(values)
        transform = float
    mean, low, high = (transform(each) for each in (math.fsum(values) / len(values), found.low, found.high))
    return Score(task, length, len(records), metric, mean, low, high, interval=found.method)


def _work(records: Sequence[Record], compares: bool) -> Work:
    def total(name: str) -> int:
        return sum(record[name] for record in records)

    work = {name: total(name) for name in ("prompt_tokens", "unique_tokens", "computed_tokens", "answer_tokens")}
    seconds = math.fsum(record["seconds"] for record in records)
    if not compares:
        return Work(**work, seconds=seconds)
    return Work(
        **work,
        seconds=seconds,
        computed_without_reuse=total("computed_without_reuse"),
        seconds_without_reuse=math.fsum(record["seconds_without_reuse"] for record in records),
        num_same_answers=total("is_same_answer"),
        num_same_scores=sum(record["score_without_reuse"] == record["score"] for record in records),
    )
