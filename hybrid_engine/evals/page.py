"""One HTML page of one report or several, side by side; it loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.plots import NUM_COLOURS, score_by_length
from hybrid_engine.evals.report import Report, Score

NUM_EXAMPLES = 3
ANSWER_CHARACTERS = 160


@dataclass(frozen=True)
class HeatMap:
    """Scores by depth and length of one task and report."""

    task: str
    report: str
    lengths: list[int]
    rows: list[tuple[float, list[float | None]]]
    """Depth, and the score at each length."""


def write_page(reports: Report | Sequence[Report], path: str | Path) -> None:
    """Write a page of one report, or of several to compare. Raises ConfigError without matplotlib, or for none."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(to_html(reports), encoding="utf-8")


def to_html(reports: Report | Sequence[Report]) -> str:
    """Return the page."""
    from jinja2 import Environment

    shown = [reports] if isinstance(reports, Report) else list(reports)
    if not shown:
        raise ConfigError("there is no report: give at least one")
    tasks = list(dict.fromkeys(score.task for report in shown for score in report.scores))
    source = files("hybrid_engine.evals").joinpath("page.html.jinja").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = lambda value: f"{100 * value:.0f}"
    environment.filters["count"] = lambda value: f"{value:,}"
    return environment.from_string(source).render(
        reports=shown,
        names=_names(shown),
        settings=_settings(shown),
        lengths=sorted({score.length for report in shown for score in report.scores}),
        tasks=[(task, _about(task, shown), _who_ran(task, shown)) for task in tasks],
        score=_find_score,
        plots=[(task, score_by_length(task, shown)) for task in tasks],
        heat_maps=[found for task in tasks for report in shown if (found := _heat_map(task, report)) is not None],
        examples=[(task, report.name, wrong) for task in tasks for report in shown if (wrong := _wrong(task, report))],
        num_colours=NUM_COLOURS,
    )


def _who_ran(task: str, reports: Sequence[Report]) -> list[tuple[int, Report]]:
    """Return the reports that have a task, each with its number."""
    return [pair for pair in enumerate(reports) if any(score.task == task for score in pair[1].scores)]


def _names(reports: Sequence[Report]) -> str:
    return " / ".join(dict.fromkeys(report.name for report in reports))


def _about(task: str, reports: Sequence[Report]) -> str:
    return next((report.settings["tasks"][task] for report in reports if task in report.settings["tasks"]), "")


def _settings(reports: Sequence[Report]) -> list[tuple[str, list[str], bool]]:
    """Return each setting's name, its value in each report, and whether the reports differ in it."""
    names = dict.fromkeys(name for report in reports for name in report.settings)
    # What each task is stands with its scores.
    names.pop("tasks")
    rows = [(name, [_as_text(report.settings.get(name, "")) for report in reports]) for name in names]
    rows.append(("made", [report.made for report in reports]))
    return [(name, values, len(set(values)) > 1 and name != "made") for name, values in rows]


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{name}: {each}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(f"{each:,}" if isinstance(each, int) else str(each) for each in value)
    return "each task's own" if value is None else str(value)


def _find_score(report: Report, task: str, length: int) -> Score | None:
    try:
        return report.score(task, length)
    except KeyError:
        return None


def _heat_map(task: str, report: Report) -> HeatMap | None:
    cells = {(cell.depth, cell.length): cell.value for cell in report.cells if cell.task == task}
    if not cells:
        return None
    lengths = sorted({length for _, length in cells})
    rows = [(depth, [cells.get((depth, length)) for length in lengths]) for depth in sorted({d for d, _ in cells})]
    return HeatMap(task, report.name, lengths, rows)


def _wrong(task: str, report: Report) -> list[dict[str, str]]:
    """Return a few answers that were not all right."""
    found = [each for each in report.samples if each["task"] == task and "pieces" not in each and each["score"] < 1]
    return [
        {
            "key": each["key"],
            "answer": each["answer"].strip()[:ANSWER_CHARACTERS],
            "wanted": ", ".join(each["references"])[:ANSWER_CHARACTERS],
        }
        for each in found[:NUM_EXAMPLES]
    ]
