"""The page: what the plots show, in an order and with words; one file that loads nothing."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from hybrid_engine.bench.prefix_report import plots
from hybrid_engine.bench.prefix_report.drawing import NUM_COLOURS, style
from hybrid_engine.bench.prefix_report.summary import COLUMNS, Section, memory_label, percent, sections, size
from hybrid_engine.bench.prefix_result import PrefixReport, PrefixRun

MAX_PANELS = 48
"""Runs of one kind of plot that are drawn; the table and the JSON have all."""


@dataclass(frozen=True)
class Key:
    """An entry of a legend."""

    name: str
    colour: str
    """CSS."""
    kind: str = "area"
    """'area', 'dashed' or 'dotted'."""
    opacity: float = 1.0
    mark: str = ""
    """A character instead."""


@dataclass(frozen=True)
class Panel:
    """A plot and what stands below it."""

    svg: str
    caption: str


@dataclass(frozen=True)
class Chapter:
    """Plots of one kind, of runs that may be compared."""

    title: str
    """Trace and model; empty where there is one for all."""
    keys: list[Key]
    lines: list[list[Panel]]
    """Panels of one memory size stand together."""
    note: str = ""


def write_html(report: PrefixReport, path: Path) -> None:
    """Write a report's page to a file. Raises ConfigError where the library for plots is missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(to_html(report), encoding="utf-8")


def to_html(report: PrefixReport) -> str:
    """Return a report as one HTML page. Raises ConfigError where the library for plots is missing."""
    from jinja2 import Environment

    with style():
        content = _content(report)
    source = files("hybrid_engine.bench.prefix_report").joinpath("page.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(source)
    return template.render(**content)


def _content(report: PrefixReport) -> dict[str, Any]:
    found = sections(report.runs)
    return {
        "report": report,
        "facts": _facts(report, found),
        "is_measured": any(run.settings.is_measured for run in report.runs),
        "is_modelled": any(not run.settings.is_measured for run in report.runs),
        "columns": COLUMNS,
        "sections": found,
        "memory_chapters": _memory_chapters(found),
        "miss_chapters": [_miss_chapter(section, found) for section in found],
        "byte_chapters": [_byte_chapter(section, found) for section in found],
        "ttft_chapters": [_ttft_chapter(section, found) for section in found],
    }


def _facts(report: PrefixReport, found: list[Section]) -> list[tuple[str, str]]:
    """Return what holds for all runs: names and values."""

    def all_of(name: str) -> str:
        return ", ".join(dict.fromkeys(str(getattr(run.settings, name)) for run in report.runs))

    facts = [
        ("made", report.made),
        ("command", report.command),
        ("models", ", ".join(dict.fromkeys(section.model for section in found))),
        ("working set", size(report.working_set_bytes) if report.working_set_bytes else ""),
        ("clock", all_of("hardware")),
        ("pace", all_of("pace")),
        ("sessions at once", all_of("concurrency")),
        ("tokens in a block", all_of("block_size")),
        ("tokens in a step", all_of("step_tokens")),
        ("calls", ", ".join(dict.fromkeys(f"{run.totals.num_requests:,}" for run in report.runs))),
        ("refused, too long", ", ".join(dict.fromkeys(f"{run.totals.num_refused:,}" for run in report.runs))),
        *report.machine.items(),
    ]
    return [(name, value) for name, value in facts if value]


def _title(section: Section, found: list[Section]) -> str:
    return section.title if len(found) > 1 else ""


def _memory_chapters(found: list[Section]) -> list[Chapter]:
    """Return a plot for each section, those with the same policies side by side."""
    chapters: list[Chapter] = []
    for section in found:
        keys, panel = _memory_keys(section), Panel(plots.hit_rate_over_memory(section), section.title)
        if chapters and chapters[-1].keys == keys:
            chapters[-1].lines[0].append(panel)
        else:
            chapters.append(Chapter("", keys, [[panel]]))
    return chapters


def _memory_keys(section: Section) -> list[Key]:
    keys = [*_policy_keys(section), Key("infinite cache", "var(--ink)", "dashed")]
    if any(run.totals.num_clairvoyant_tokens is not None for run in section.runs):
        keys.append(Key("knows the future", "var(--ink)", "dotted"))
    return keys


def _miss_chapter(section: Section, found: list[Section]) -> Chapter:
    lines = _lines(section)
    runs = [run for line in lines for run in line]
    top = plots.missed_top(runs)
    known = dict.fromkeys([*plots.REASONS, *(reason for run in runs for reason in run.totals.missed_tokens)])
    missed = [reason for reason in known if any(run.totals.missed_tokens.get(reason) for run in runs)]
    keys = [Key(name.replace("_", " "), f"var(--series-{plots.reason_colour(name)})") for name in missed]
    panels = [[Panel(plots.misses_over_time(run, top=top), _caption(run)) for run in line] for line in lines]
    return Chapter(_title(section, found), keys[::-1], panels, _note(section))


def _byte_chapter(section: Section, found: list[Section]) -> Chapter:
    lines = _lines(section)
    runs = [run for line in lines for run in line]
    keys = []
    for number, name in enumerate(dict.fromkeys(group.name for run in runs for group in run.series.groups)):
        colour = f"var(--series-{number % NUM_COLOURS})"
        for kind, opacity in (("held", plots.HELD), ("cached", plots.CACHED), ("empty", plots.EMPTY)):
            keys.append(Key(f"{name.replace('_', ' ')}: {kind}", colour, opacity=opacity))
    if any(any(run.series.unowned_bytes) for run in runs):
        keys.append(Key("of no group", "var(--grid)"))
    panels = [[Panel(plots.bytes_over_time(run), _caption(run)) for run in line] for line in lines]
    return Chapter(_title(section, found), keys, panels, _note(section))


def _ttft_chapter(section: Section, found: list[Section]) -> Chapter:
    limits = plots.ttft_limits(section.runs)
    panels = [
        Panel(plots.ttft_distribution(runs, section.policies, limits=limits), _ttft_caption(runs[0]))
        for runs in section.by_memory()
    ]
    return Chapter(_title(section, found), _policy_keys(section), [panels[:MAX_PANELS]])


def _note(section: Section) -> str:
    num_runs = len(section.runs)
    return f"Of {num_runs} runs, the first {MAX_PANELS} are drawn." if num_runs > MAX_PANELS else ""


def _lines(section: Section) -> list[list[PrefixRun]]:
    """Return the runs that are drawn: a line for each memory size, or one for all where each has a single policy."""
    num_left = MAX_PANELS
    lines: list[list[PrefixRun]] = []
    for runs in section.by_memory():
        lines.append(runs[:num_left])
        num_left -= len(lines[-1])
    return lines if len(section.policies) > 1 else [[run for line in lines for run in line]]


def _policy_keys(section: Section) -> list[Key]:
    marks = list(plots.MARKERS.values())
    return [
        Key(policy, f"var(--series-{number % NUM_COLOURS})", mark=marks[number % len(marks)])
        for number, policy in enumerate(section.policies)
    ]


def _caption(run: PrefixRun) -> str:
    return f"{run.settings.policy}, {memory_label(run)}: {percent(run.totals.hit_rate)} hit"


def _ttft_caption(run: PrefixRun) -> str:
    how = "measured" if run.settings.is_measured else f"modelled for {run.settings.hardware}"
    return f"{memory_label(run)}, {how}"
