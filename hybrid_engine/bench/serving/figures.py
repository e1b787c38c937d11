"""What the times of many requests add up to, under the names that vLLM's benchmark has made known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from rich.table import Table

from hybrid_engine.bench.serving.client import Answer
from hybrid_engine.bench.serving.drive import Drive
from hybrid_engine.errors import ConfigError

TIMES = ("ttft", "tpot", "itl", "e2el")
"""To the first token; for each further token, on average over one answer; between news; to the end."""
PERCENTILES = (50, 90, 99)


def parse_slo(texts: Sequence[str]) -> dict[str, float]:
    """Read limits like 'ttft:500', in milliseconds; return seconds. Raises ConfigError for others."""
    slo = {}
    for text in texts:
        name, _, limit = text.partition(":")
        try:
            slo[name] = float(limit) / 1000
        except ValueError:
            slo[name] = -1.0
        if name not in ("ttft", "tpot", "e2el") or not slo[name] > 0:
            raise ConfigError(f"goodput is {text!r}, must be like 'ttft:500': ttft, tpot or e2el, and milliseconds")
    return slo


def figures(drive: Drive, slo: Mapping[str, float]) -> dict[str, Any]:
    """Return the figures of one run, times in milliseconds. slo: limits that a good request keeps, in seconds."""
    good = [answer for answer in drive.answers if answer.error is None]
    num_prompt, num_cached = sum(a.num_prompt_tokens for a in good), sum(a.num_cached_tokens for a in good)
    num_answer = sum(a.num_answer_tokens for a in good)
    found: dict[str, Any] = {
        "duration": drive.seconds,
        "completed": len(good),
        "failed": len(drive.answers) - len(good),
        "errors": dict(Counter(a.error for a in drive.answers if a.error is not None).most_common(5)),
        "max_concurrent_requests": drive.max_in_flight,
        "total_input_tokens": num_prompt,
        "cached_input_tokens": num_cached,
        "cached_share": num_cached / max(num_prompt, 1),
        "total_output_tokens": num_answer,
        "request_throughput": len(good) / drive.seconds,
        "output_throughput": num_answer / drive.seconds,
        "total_token_throughput": (num_prompt + num_answer) / drive.seconds,
    }
    if slo:
        found["request_goodput"] = sum(_keeps(answer, slo) for answer in good) / drive.seconds
    for name in TIMES:
        found |= _statistics(name, _times(good, name))
    return found


def _keeps(answer: Answer, slo: Mapping[str, float]) -> bool:
    return all(getattr(answer, name) <= limit for name, limit in slo.items())


def _times(answers: Sequence[Answer], name: str) -> list[float]:
    if name == "itl":
        return [gap for answer in answers for gap in answer.itls]
    # One token has no time for each further one.
    return [getattr(answer, name) for answer in answers if name != "tpot" or len(answer.news) > 1]


def _statistics(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    names = [f"mean_{name}_ms", *(f"p{percent}_{name}_ms" for percent in PERCENTILES)]
    if not seconds:
        return dict.fromkeys(names)
    values = np.asarray(seconds) * 1000
    return dict(zip(names, (float(values.mean()), *np.percentile(values, PERCENTILES).tolist()), strict=True))


ROWS = {
    "requests": "completed",
    "  failed": "failed",
    "  at once, at most": "max_concurrent_requests",
    "requests/s": "request_throughput",
    "  within the limits": "request_goodput",
    "prompt tokens": "total_input_tokens",
    "  share cached": "cached_share",
    "answer tokens": "total_output_tokens",
    "answer tokens/s": "output_throughput",
    **{
        f"{name.upper()} ms, {kind}": f"{kind}_{name}_ms"
        for name in TIMES
        for kind in ("mean", *(f"p{percent}" for percent in PERCENTILES))
    },
}


def table(columns: Mapping[str, Mapping[str, Any]], *, title: str) -> Table:
    """Show the figures of some servers side by side."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("what")
    for name in columns:
        shown.add_column(name, justify="right")
    for label, key in ROWS.items():
        if any(key in figures for figures in columns.values()):
            shown.add_row(label, *(_cell(figures.get(key)) for figures in columns.values()))
    return shown


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure over several runs; errors are added up."""
    found: dict[str, Any] = {"errors": dict(sum((Counter(run["errors"]) for run in runs), Counter()))}
    for key in runs[0]:
        values = [run[key] for run in runs if isinstance(run[key], int | float)]
        if values:
            found[key] = float(np.median(values))
    return found


def ratio_line(ours: Sequence[Mapping[str, Any]], theirs: Sequence[Mapping[str, Any]], peer: str) -> str:
    """Say how many times a peer's throughput the first server has, round by round: in one, both had the same luck.

    Rounds in which one of them answered nothing, or not all that the other did, compare nothing.
    """
    key = "output_throughput"
    ratios = [
        mine[key] / other[key]
        for mine, other in zip(ours, theirs, strict=True)
        if mine["failed"] == other["failed"] == 0 and other[key] > 0
    ]
    if not ratios:
        return f"answer tokens/s by those of {peer}: no round in which both answered everything"
    low, middle, high = min(ratios), float(np.median(ratios)), max(ratios)
    return f"answer tokens/s by those of {peer}: {middle:.2f} x ({low:.2f} - {high:.2f}, {len(ratios)} rounds)"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    if isinstance(value, int) or value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.1f}" if abs(value) >= 10 else f"{value:.3g}"
