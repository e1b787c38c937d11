"""What the report says of each run in words and figures, and how sizes and times are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from hybrid_engine.bench.prefix_result import PrefixRun

CLAIRVOYANT = "clairvoyant"
"""The policy of a bound: what is to come is known to nobody who serves."""
COLUMNS = (
    ("memory", "Cache memory of all groups; behind it the share of the working set, where it was given so."),
    ("policy", "What decides which checkpoint is given up when memory is short."),
    ("hit rate", "Share of the prompt tokens that were found in the cache."),
    ("of infinite", "Hit tokens by those of a cache that never gives anything up and matches to the token."),
    ("of clairvoyant", "Hit tokens by those of the same engine where who knows the future decides what is given up."),
    ("evicted", "Prompt tokens computed again because they had been given up for lack of memory."),
    ("recomputed", "Tokens computed again because a preemption had lost them."),
    ("TTFT p50", "Seconds from a call's submission to the first token of its answer: the median."),
    ("p90", "The same: nine of ten calls had it by then."),
    ("p99", "The same: all but one of a hundred had it by then."),
    ("preemptions", "How often a running request was put back."),
    ("orphan bytes", "Most bytes, at any sample, of cached blocks that no prompt could be resumed with; 0 is right."),
)
"""Titles of the table's columns, and what they mean."""


@dataclass(frozen=True)
class Row:
    """A run in the table."""

    run: PrefixRun
    cells: tuple[str, ...]
    """One for each column."""
    is_best: bool
    """It has the most hits of the runs with its trace, model and memory, bounds apart, and there are others."""


@dataclass(frozen=True)
class Section:
    """Runs that may be compared: one trace, one model."""

    trace: str
    model: str
    runs: tuple[PrefixRun, ...]

    @property
    def policies(self) -> tuple[str, ...]:
        """In the order in which they come."""
        return tuple(dict.fromkeys(run.settings.policy for run in self.runs))

    @property
    def title(self) -> str:
        """Trace and model."""
        return f"{self.trace} · {self.model}"

    def rows(self) -> list[Row]:
        """Return the table's rows: smaller memories first, policies as they come."""
        found = []
        for runs in self.by_memory():
            hits = [run.totals.num_hit_tokens for run in runs if run.settings.policy != CLAIRVOYANT]
            best = max(hits) if len(hits) > 1 else None
            for run in runs:
                is_best = run.totals.num_hit_tokens == best and run.settings.policy != CLAIRVOYANT
                found.append(Row(run, _cells(run), is_best))
        return found

    def by_memory(self) -> list[list[PrefixRun]]:
        """Return the runs of each memory size, smaller ones first; policies stay as they come."""
        return [list(runs) for _, runs in groupby(sorted(self.runs, key=_memory), key=_memory)]


def sections(runs: Sequence[PrefixRun]) -> list[Section]:
    """Sort runs by what may be compared."""
    found: dict[tuple[str, str], list[PrefixRun]] = {}
    for run in runs:
        found.setdefault((run.settings.trace, run.settings.model), []).append(run)
    return [Section(trace, model, tuple(group)) for (trace, model), group in found.items()]


def _memory(run: PrefixRun) -> int:
    return run.settings.memory_bytes


def _cells(run: PrefixRun) -> tuple[str, ...]:
    totals = run.totals
    clairvoyant = totals.share_of_clairvoyant
    ttft = (seconds(value) for value in (totals.ttft_s.p50, totals.ttft_s.p90, totals.ttft_s.p99))
    return (
        memory_label(run),
        run.settings.policy,
        percent(totals.hit_rate),
        percent(totals.share_of_infinite),
        "-" if clairvoyant is None else percent(clairvoyant),
        f"{totals.missed_tokens.get('evicted', 0):,}",
        f"{totals.num_recomputed_tokens:,}",
        *ttft,
        f"{totals.num_preemptions:,}",
        f"{totals.max_orphan_bytes:,}",
    )


def memory_label(run: PrefixRun) -> str:
    """Return a run's memory, and its share of the working set."""
    share = run.settings.memory_share
    return size(run.settings.memory_bytes) + ("" if share is None else f" ({100 * share:g} %)")


def percent(share: float) -> str:
    """Return a share in words."""
    return f"{100 * share:.1f} %"


def size(num_bytes: float) -> str:
    """Return bytes in words."""
    unit, name = byte_unit(num_bytes)
    return f"{num_bytes / unit:,.3g} {name}" if num_bytes < 1000 * unit else f"{num_bytes / unit:,.0f} {name}"


def byte_unit(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit of which there is at least one."""
    return next((unit for unit in BYTE_UNITS if num_bytes >= unit[0]), (1, "B"))


def seconds(value: float) -> str:
    """Return a duration in words."""
    return f"{1000 * value:,.3g} ms" if value < 1 else f"{value:,.3g} s" if value < 1000 else f"{value:,.0f} s"


def time_unit(value: float) -> tuple[float, str]:
    """Return a unit in which a duration is a handy number."""
    return next((unit for unit in TIME_UNITS if value >= 2 * unit[0]), (1.0, "s"))


BYTE_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
TIME_UNITS = ((86_400.0, "d"), (3_600.0, "h"), (60.0, "min"))
