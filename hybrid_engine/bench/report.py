"""What a benchmark found, and how it is shown: a table, JSON, a page for docs/results."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Figure:
    """One quantity, measured several times."""

    name: str
    unit: str
    values: tuple[float, ...]
    """One for each round."""
    at_most: float | None = None
    """What the median should not exceed."""
    at_least: float | None = None
    """What the median should reach."""

    @property
    def median(self) -> float:
        """The middle of the rounds."""
        return median(self.values)

    @property
    def goal(self) -> str:
        """The goal and whether it was met, in words; empty when there is none."""
        if self.at_most is None and self.at_least is None:
            return ""
        if self.at_most is not None:
            limit, is_met = f"at most {self.at_most:g}", self.median <= self.at_most
        else:
            assert self.at_least is not None
            limit, is_met = f"at least {self.at_least:g}", self.median >= self.at_least
        return f"{limit}: {'met' if is_met else 'MISSED'}"

    def cells(self) -> tuple[str, ...]:
        """The figure as a row: name, median, range, unit, goal."""
        low, high = min(self.values), max(self.values)
        return self.name, _number(self.median), f"{_number(low)} - {_number(high)}", self.unit, self.goal


@dataclass(frozen=True)
class Report:
    """The figures of one benchmark."""

    title: str
    figures: tuple[Figure, ...]
    notes: tuple[str, ...] = ()
    """How it was measured, and what could not be."""


COLUMNS = ("what", "median", "min - max", "unit", "goal")


def print_report(report: Report, console: Console) -> None:
    """Show a report as a table."""
    table = Table(title=report.title, title_justify="left")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in ("median", "min - max") else "left")
    for figure in report.figures:
        table.add_row(*figure.cells())
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}", highlight=False)
    console.print()


def write_json(reports: list[Report], path: Path) -> None:
    """Write reports, and the machine they were measured on, to a file."""
    content = {"measured": _now(), "machine": machine_facts(), "reports": [asdict(report) for report in reports]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_markdown(reports: list[Report], path: Path, *, command: str) -> None:
    """Write reports as a page for docs/results. command: what produced them."""
    lines = [f"# Results of {_now()[:10]}", "", f"Command: `{command}`", ""]
    lines += [f"- {name}: {value}" for name, value in machine_facts().items()]
    for report in reports:
        lines += ["", f"## {report.title}", "", _row(COLUMNS), _row(["---"] * len(COLUMNS))]
        lines += [_row(figure.cells()) for figure in report.figures]
        lines += ["", *(f"- {note}" for note in report.notes)] if report.notes else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def machine_facts() -> dict[str, str]:
    """Return what a reader must know of this machine to compare figures."""
    return {
        "processor": _processor_name(),
        "cores": str(os.cpu_count()),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "transformers", "hybrid-engine")},
    }


def _processor_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _row(cells: tuple[str, ...] | list[str]) -> str:
    return "| " + " | ".join(cells) + " |"
