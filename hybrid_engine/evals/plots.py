"""Score by length as SVG that takes its colours from the page."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_engine.evals.report import Report, Score

NUM_COLOURS = 6
INK, GRID = "#010f01", "#010f02"
SERIES = tuple(f"#010f{index:02x}" for index in range(0x10, 0x10 + NUM_COLOURS))
"""Placeholders: in the SVG's text they become variables of the page's style sheet."""
VARIABLES = {INK: "--ink", GRID: "--grid"} | {colour: f"--series-{i}" for i, colour in enumerate(SERIES)}
MARKERS = "osD^vP"
MIN_TICK_RATIO = 1.3
STYLE = {
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "none",
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "svg.fonttype": "none",
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
}


def score_by_length(task: str, reports: Sequence[Report]) -> str:
    """Return an SVG element: one line for each report, with 95 % intervals. Raises ConfigError without matplotlib."""
    try:
        from matplotlib import rc_context
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("the page's plots need matplotlib: pip install 'hybrid-engine[evals]'") from error
    found = [[score for score in report.scores if score.task == task] for report in reports]
    lengths = sorted({score.length for scores in found for score in scores})
    metric = next(score.metric for scores in found for score in scores)
    settings: Any = STYLE  # the library's stubs know its settings one by one
    with rc_context(settings):
        figure = Figure(figsize=(3.6, 2.3), layout="constrained")
        axes = figure.add_subplot()
        for number, scores in enumerate(found):
            if scores:
                _draw(axes, scores, number, shift=(number - (len(reports) - 1) / 2) * 0.03)
        axes.set_xscale("log", base=2)
        shown = _apart(lengths)
        axes.set_xticks(shown, [_short(length) for length in shown])
        axes.minorticks_off()
        axes.set_xlabel("tokens of prompt and answer")
        if metric == "score":
            axes.set_ylim(-4, 104)
            axes.set_ylabel("score, %")
        else:
            axes.set_ylabel(metric)
            axes.set_ylim(bottom=0)
        svg = io.StringIO()
        figure.savefig(svg, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    return _as_element(svg.getvalue(), f"{task}: {metric} by length")


def _draw(axes: object, scores: Sequence[Score], number: int, *, shift: float) -> None:
    factor = 100 if scores[0].metric == "score" else 1
    values = [factor * score.value for score in scores]
    below = [value - factor * score.low for value, score in zip(values, scores, strict=True)]
    above = [factor * score.high - value for value, score in zip(values, scores, strict=True)]
    axes.errorbar(  # type: ignore[attr-defined]
        [score.length * 2**shift for score in scores],
        values,
        # A percentile interval of few values may leave its mean outside.
        yerr=[[max(0.0, each) for each in below], [max(0.0, each) for each in above]],
        color=SERIES[number % NUM_COLOURS],
        marker=MARKERS[number % len(MARKERS)],
        markersize=4,
        linewidth=1.4,
        elinewidth=0.9,
        capsize=2.5,
    )


def _apart(lengths: Sequence[int]) -> list[int]:
    """Return the lengths whose labels don't run into each other."""
    found: list[int] = []
    for length in lengths:
        found += [length] if not found or length > MIN_TICK_RATIO * found[-1] else []
    return found


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"


def _as_element(document: str, label: str) -> str:
    """Return what may stand inside HTML: no prolog, no names that other figures on the page have too."""
    size = re.search(r'viewBox="[^"]*"', document)
    assert size is not None, document[:200]
    body = document[document.index(">", document.index("<svg")) + 1 :]
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    prefix = re.sub(r"\W", "-", label)
    body = re.sub(r'(id="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = re.sub(r"(?<=\.\d)\d{2,}", "", body)
    return f'<svg role="img" aria-label="{label}" {size[0]}>{body}'
