"""Plots as SVG to stand in an HTML page: colours are the page's own, so that they follow light and dark.

Figures are drawn with placeholder colours, which become CSS variables in the SVG's text.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8
INK, GRID = "#010f01", "#010f02"
SERIES = tuple(f"#010f{index:02x}" for index in range(0x10, 0x10 + NUM_COLOURS))
"""Take colours from here by index: more things than these need another way to be told apart."""
VARIABLES = {INK: "--ink", GRID: "--grid"} | {colour: f"--series-{index}" for index, colour in enumerate(SERIES)}
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.6,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "figure.facecolor": "none",
    "font.family": ["DejaVu Sans"],
    "font.size": 9,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    # Names of traces are no mathematics, whatever they hold.
    "text.parse_math": False,
    "savefig.facecolor": "none",
    # Text stays text: it can be searched and read aloud, and takes the page's colour.
    "svg.fonttype": "none",
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}
MARGINS = (0.64, 0.5, 0.2, 0.08)
"""Inches on the left, below, on the right, above: room for a label and numbers of five characters. They are the same in
all plots, so that those side by side line up; a layout engine would also take half of the time."""
NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@contextmanager
def style(**changes: object) -> Iterator[None]:
    """Draw inside with our style. Raises ConfigError where the library for plots is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError("plots need matplotlib: pip install 'hybrid-engine[bench]'") from error
    # Its stubs know the settings' names one by one.
    settings: Any = {**STYLE, **changes}
    with matplotlib.rc_context(settings):
        yield


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure of this many inches, and its axes; no window and no state of the library's is involved."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height))
    left, bottom, right, top = MARGINS
    return figure, figure.add_axes(
        (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    )


def to_svg(figure: Figure, *, label: str) -> str:
    """Return a figure as an SVG element. label: what it shows, for who doesn't see it."""
    text = io.StringIO()
    # Names inside come from the label: the same report gives the same page, and no two figures of one share a name.
    with style(**{"svg.hashsalt": label}):
        figure.savefig(text, format="svg", metadata=NO_METADATA)
    return _as_element(text.getvalue(), label)


def _as_element(document: str, label: str) -> str:
    """Return what may stand inside HTML: no prolog, no names that other figures on the page have too."""
    body = document[document.index(">", document.index("<svg")) + 1 :]
    size = re.search(r'viewBox="[^"]*"', document)
    assert size is not None, document[:200]
    for colour, variable in VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    referred = set(re.findall(r'(?:href="#|url\(#)([^")]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in referred else "", body)
    # A tenth of a point is finer than a screen.
    body = re.sub(r"(?<=\.\d)\d{2,}", "", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    return f'<svg role="img" aria-label="{_escaped(label)}" {size[0]}>{body}'


def _escaped(text: str) -> str:
    from markupsafe import escape

    return str(escape(text))


def colour_of(name: str, names: Sequence[str]) -> str:
    """Return the colour that a name has among others; beyond the last colour they begin again."""
    return SERIES[list(names).index(name) % NUM_COLOURS]
