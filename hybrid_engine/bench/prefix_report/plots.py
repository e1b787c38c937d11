"""The report's plots: each takes runs and returns SVG, without a title or a legend, which the page has as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from hybrid_engine.bench.prefix_report.drawing import GRID, INK, SERIES, colour_of, new_figure, to_svg
from hybrid_engine.bench.prefix_report.summary import Section, byte_unit, memory_label, size, time_unit
from hybrid_engine.bench.prefix_result import GroupSeries, PrefixRun, Seconds, Series

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 4.6, 2.7
"""Inches; the page scales them."""
MAX_BINS, MAX_POINTS = 60, 150
"""A panel is too small to show more."""
MARKERS = dict(zip("os^Dv<P*", "●■▲◆▼◀✚★", strict=True))
"""Policies are told apart by these too, not by colour alone: as the plots have them, and as text has them."""
REASONS = {"evicted": 1, "missing_state": 4, "missing_window": 6, "alignment": 3, "never_seen": 0, "disabled": 7}
"""From the bottom of the stack to its top; the index of the colour."""
HELD, CACHED, EMPTY = 1.0, 0.5, 0.14
"""How opaque bytes of each kind are."""


def hit_rate_over_memory(section: Section) -> str:
    """Draw a line for each policy, below what could be hit at all."""
    figure, axes = new_figure(WIDTH, HEIGHT)
    memories = sorted({run.settings.memory_bytes for run in section.runs})
    for policy in section.policies:
        runs = sorted((run for run in section.runs if run.settings.policy == policy), key=_memory)
        colour, marker = colour_of(policy, section.policies), _marker_of(policy, section.policies)
        rates = [100 * run.totals.hit_rate for run in runs]
        axes.plot([_memory(run) for run in runs], rates, color=colour, marker=marker, markersize=5, linewidth=1.6)
    for of_bound, dashes in ((_infinite_rate, (5, 2)), (_clairvoyant_rate, (1, 1.5))):
        bounds = {_memory(run): rate for run in section.runs if (rate := of_bound(run)) is not None}
        if bounds:
            x = sorted(bounds)
            mark = "_" if len(x) == 1 else ""
            y = [bounds[memory] for memory in x]
            axes.plot(x, y, color=INK, linewidth=1.2, dashes=dashes, marker=mark, markersize=18)
    _label_memories(axes, memories)
    axes.set_ylabel("prompt tokens hit (%)")
    axes.margins(y=0.08)
    return to_svg(figure, label=f"Hit rate over memory, {section.title}")


def misses_over_time(run: PrefixRun, *, top: float) -> str:
    """Draw the shares of the prompt tokens that were missed, stacked by reason. top: where the axis ends, in %."""
    figure, axes = new_figure(WIDTH, HEIGHT)
    times, shares = _missed_shares(run.series)
    unit, name = time_unit(times[-1] if times else 0.0)
    if times:
        x = np.array([0.0, *times]) / unit
        y = np.array([[values[0], *values] for values in shares.values()])
        colours = [SERIES[reason_colour(reason)] for reason in shares]
        axes.stackplot(x, y, colors=colours, step="pre", linewidth=0)
    axes.set(xlabel=f"time ({name})", ylabel="prompt tokens missed (%)", ylim=(0, top), xlim=_from_zero(times, unit))
    return to_svg(figure, label=f"Misses over time, {run.settings.policy}, {memory_label(run)}")


def missed_top(runs: Iterable[PrefixRun]) -> float:
    """Return where the axes of `misses_over_time` should end, in %, so that panels can be compared.

    The first calls of a run find nothing and would leave no room for the rest: what is beyond is cut off.
    """
    tops = [1.0]
    for run in runs:
        shares = _missed_shares(run.series)[1]
        if shares:
            tops.append(1.25 * float(np.quantile(np.sum(list(shares.values()), axis=0), 0.93)))
    return min(100.0, max(tops))


def reason_colour(reason: str) -> int:
    """Return the index of a reason's colour; reasons that are not known here share one."""
    return REASONS.get(reason, 5)


def bytes_over_time(run: PrefixRun) -> str:
    """Draw each group's bytes, stacked: held, cached, empty; above them what belongs to no group."""
    figure, axes = new_figure(WIDTH, HEIGHT)
    series = run.series
    chosen = _evenly(len(series.time_s), MAX_POINTS)
    times = [series.time_s[index] for index in chosen]
    unit, unit_name = time_unit(times[-1] if times else 0.0)
    byte, byte_name = byte_unit(max([run.settings.memory_bytes, *(_group_total(series, index) for index in chosen)]))
    layers = [
        (colour, opacity, [values[index] / byte for index in chosen])
        for number, group in enumerate(series.groups)
        for colour, opacity, values in _layers(group, SERIES[number % len(SERIES)])
    ]
    layers.append((GRID, 1.0, [series.unowned_bytes[index] / byte for index in chosen]))
    tops = list(accumulate((np.array(values) for _, _, values in layers), initial=np.zeros(len(chosen))))
    for (colour, opacity, _), low, high in zip(layers, tops, tops[1:], strict=False):
        axes.fill_between(np.array(times) / unit, low, high, color=colour, alpha=opacity, linewidth=0)
    axes.set(xlabel=f"time ({unit_name})", ylabel=f"memory ({byte_name})", xlim=_from_zero(times, unit))
    axes.set_ylim(bottom=0)
    return to_svg(figure, label=f"Bytes by group over time, {run.settings.policy}, {memory_label(run)}")


def ttft_distribution(runs: Sequence[PrefixRun], policies: Sequence[str], *, limits: tuple[float, float]) -> str:
    """Draw which share of the calls had its first token by when; marks at the median, 90 % and 99 %.

    limits: where the axis of times begins and ends, in seconds.
    """
    figure, axes = new_figure(WIDTH, HEIGHT)
    for run in runs:
        policy = run.settings.policy
        colour, marker = colour_of(policy, policies), _marker_of(policy, policies)
        shares, values = _distribution(run)
        if values[-1] <= 0:
            continue
        axes.plot(values, shares, color=colour, linewidth=1.4)
        times = (run.totals.ttft_s.p50, run.totals.ttft_s.p90, run.totals.ttft_s.p99)
        axes.plot(times, (50, 90, 99), color=colour, marker=marker, markersize=4, linewidth=0)
    axes.set_xscale("log", nonpositive="clip")
    ticks = _log_ticks(*limits)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set(xlabel="time to first token (s, logarithmic)", ylabel="calls (%)", xlim=limits, ylim=(0, 102))
    return to_svg(figure, label=f"Time to first token, {memory_label(runs[0])}")


def ttft_limits(runs: Iterable[PrefixRun]) -> tuple[float, float]:
    """Return where the axes of `ttft_distribution` should begin and end, so that panels can be compared."""
    times = [value for run in runs for value in _distribution(run)[1] if value > 0]
    return (0.9 * min(times), 1.1 * max(times)) if times else (0.1, 10.0)


def _log_ticks(low: float, high: float) -> list[float]:
    """Return round numbers from low to high, as many as have room."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps if low <= step * 10.0**decade <= high]
        if len(ticks) <= 7:
            break
    return ticks


def _marker_of(policy: str, policies: Sequence[str]) -> str:
    return list(MARKERS)[policies.index(policy) % len(MARKERS)]


def _distribution(run: PrefixRun) -> tuple[list[float], list[float]]:
    """Return shares of the calls, in %, and the seconds by which they had their first token."""
    if run.totals.ttft_quantiles_s:
        return list(np.linspace(0, 100, len(run.totals.ttft_quantiles_s))), run.totals.ttft_quantiles_s
    known: Seconds = run.totals.ttft_s
    return [50, 90, 99], [known.p50, known.p90, known.p99]


def _memory(run: PrefixRun) -> int:
    return run.settings.memory_bytes


def _infinite_rate(run: PrefixRun) -> float | None:
    return 100 * run.totals.num_infinite_tokens / max(1, run.totals.num_prompt_tokens)


def _clairvoyant_rate(run: PrefixRun) -> float | None:
    found = run.totals.num_clairvoyant_tokens
    return None if found is None else 100 * found / max(1, run.totals.num_prompt_tokens)


def _label_memories(axes: Axes, memories: Sequence[int]) -> None:
    """Put a tick at each size that was run, as far as their names don't meet."""
    axes.set_xscale("log", base=2)
    span = max(1e-9, math.log(memories[-1] / memories[0]))
    shown: list[int] = []
    for memory in memories:
        if not shown or math.log(memory / shown[-1]) > span / 8:
            shown.append(memory)
    axes.set_xticks(shown, labels=[size(memory) for memory in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlabel("cache memory (logarithmic)")
    axes.set_xlim(memories[0] / 1.15, memories[-1] * 1.15)


def _missed_shares(series: Series) -> tuple[list[float], dict[str, list[float]]]:
    """Return the ends of at most MAX_BINS spans of time, and for each reason the share in them, in %."""
    ends = [each[-1] for each in _spans(len(series.time_s))]
    missed = {reason: _sums(counts) for reason, counts in series.missed_tokens.items() if any(counts)}
    totals = np.array(_sums(series.hit_tokens)) + np.array(_sums(series.last_tokens))
    totals = totals + np.sum(list(missed.values()), axis=0) if missed else totals
    known = [reason for reason in REASONS if reason in missed] + [reason for reason in missed if reason not in REASONS]
    shares = {reason: list(100 * np.array(missed[reason]) / np.maximum(1, totals)) for reason in known}
    return [series.time_s[index] for index in ends], shares


def _spans(num_samples: int) -> list[range]:
    """Cut samples into at most MAX_BINS spans of equal length, the last maybe shorter."""
    step = max(1, math.ceil(num_samples / MAX_BINS))
    return [range(start, min(start + step, num_samples)) for start in range(0, num_samples, step)]


def _sums(counts: Sequence[int]) -> list[int]:
    return [sum(counts[index] for index in span) for span in _spans(len(counts))]


def _evenly(count: int, most: int) -> list[int]:
    """Return at most so many indexes, the first and the last among them."""
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, most))}) if count else []


def _layers(group: GroupSeries, colour: str) -> Iterable[tuple[str, float, list[int]]]:
    yield colour, HELD, group.held_bytes
    yield colour, CACHED, group.cached_bytes
    yield colour, EMPTY, group.empty_bytes


def _group_total(series: Series, index: int) -> int:
    groups = sum(each.held_bytes[index] + each.cached_bytes[index] + each.empty_bytes[index] for each in series.groups)
    return groups + series.unowned_bytes[index]


def _from_zero(times: Sequence[float], unit: float) -> tuple[float, float]:
    return 0.0, max(times, default=0.0) / unit or 1.0
