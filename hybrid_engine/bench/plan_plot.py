"""How many requests fit in the cache memory, over their length: as a plot (PNG, SVG) and as a table for a terminal.

What is drawn is a `Capacity`, plain numbers; `capacity_of` works it out from a plan.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from hybrid_engine.bench.prefix_report.drawing import GRID, INK, STYLE, style
from hybrid_engine.bench.prefix_report.summary import percent, size
from hybrid_engine.errors import ConfigError
from hybrid_engine.plan import MemoryPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CONTEXTS = tuple(2**power for power in range(10, 21))
"""Tokens: 1k to 1M."""
SUFFIXES = (".png", ".svg")
PAPER = {INK: "#1c2128", GRID: "#d5dbe1"}
COLOURS = ("#0b6cb8", "#d4501c", "#128a63", "#c2568f", "#d99100", "#3a9fd6", "#7a56a8")
LIMIT_COLOUR = "#808890"
NAME_OF_LIMIT = "most requests at once"
BAR_CELLS = 20
FLOOR = 0.7
"""Where the axis of requests begins: below one."""


@dataclass(frozen=True)
class Capacity:
    """Requests that fit at once, sharing nothing, for several lengths. Entry i of each tuple belongs to contexts[i]."""

    memory_bytes: int
    groups: tuple[str, ...]
    """Names of the groups that share the memory."""
    contexts: tuple[int, ...]
    """Tokens of a request, ascending."""
    num_requests: tuple[int, ...]
    """How many fit; 0: not even one."""
    group_bytes: tuple[tuple[int, ...], ...]
    """What one request takes of each group."""
    max_requests: int | None = None
    """Most requests that run at once whatever fits; None: no limit."""

    def __post_init__(self) -> None:
        lengths = {len(self.contexts), len(self.num_requests), len(self.group_bytes)}
        assert lengths == {len(self.contexts)} != {0}, self
        assert all(len(sizes) == len(self.groups) for sizes in self.group_bytes), self

    def num_running(self, index: int) -> int:
        """Return how many requests run at once."""
        fitting = self.num_requests[index]
        return fitting if self.max_requests is None else min(fitting, self.max_requests)

    def shares(self, index: int) -> tuple[float, ...]:
        """Return which share of a request's bytes each group takes."""
        total = sum(self.group_bytes[index])
        return tuple(num_bytes / total for num_bytes in self.group_bytes[index])

    def binding(self, index: int) -> str:
        """Return what keeps more from running: the limit, or else the group that takes most of the memory."""
        if self.max_requests is not None and self.num_requests[index] >= self.max_requests:
            return NAME_OF_LIMIT
        shares = self.shares(index)
        return self.groups[shares.index(max(shares))]


def capacity_of(
    plan: MemoryPlan,
    names: Mapping[int, str],
    *,
    contexts: Sequence[int] = CONTEXTS,
    chunk_tokens: int = 1,
    num_states: int = 1,
    max_requests: int | None = None,
) -> Capacity:
    """Work out what fits. names: of the groups, by id; chunk_tokens and num_states as in `MemoryPlan.request_bytes`."""
    needs = [plan.request_bytes(length, chunk_tokens=chunk_tokens, num_states=num_states) for length in contexts]
    fitting = [plan.num_requests(length, chunk_tokens=chunk_tokens, num_states=num_states) for length in contexts]
    ids = [group.group_id for group in plan.groups]
    return Capacity(
        memory_bytes=plan.memory_bytes,
        groups=tuple(names[group_id] for group_id in ids),
        contexts=tuple(contexts),
        num_requests=tuple(fitting),
        group_bytes=tuple(tuple(sizes[group_id] for group_id in ids) for sizes in needs),
        max_requests=max_requests,
    )


def table(capacity: Capacity, *, title: str) -> Table:
    """Return a row for each length: requests at once, as a bar too (logarithmic), and who takes the memory."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("context", justify="right")
    shown.add_column("requests", justify="right")
    shown.add_column("", min_width=BAR_CELLS)
    shown.add_column("one takes", justify="right")
    for name in capacity.groups:
        shown.add_column(name, justify="right")
    shown.add_column("binds")
    most = max(capacity.num_running(index) for index in range(len(capacity.contexts)))
    for index, length in enumerate(capacity.contexts):
        running = capacity.num_running(index)
        cells = round(BAR_CELLS * math.log1p(running) / math.log1p(max(most, 1)))
        shown.add_row(
            tokens(length),
            f"{running:,}" if running else "none",
            "█" * cells,
            size(sum(capacity.group_bytes[index])),
            *(percent(share) for share in capacity.shares(index)),
            capacity.binding(index),
        )
    return shown


def draw(capacity: Capacity, path: Path, *, title: str) -> None:
    """Write the plot to a file, PNG or SVG by its name.

    Raises ConfigError for another name, and where the library for plots is missing.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"the plot's file is {path.name!r}, its name must end in {' or '.join(SUFFIXES)}")
    colours = {name: PAPER[value] for name, value in STYLE.items() if isinstance(value, str) and value in PAPER}
    with style(**colours, **{"figure.facecolor": "white", "savefig.facecolor": "white"}):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7.5, 6.0), layout="constrained")
        above, between, below = figure.subplots(3, 1, sharex=True, height_ratios=(3, 0.18, 2))
        _draw_requests(above, capacity)
        _draw_binding(between, capacity)
        _draw_shares(below, capacity)
        _label_contexts(below, capacity.contexts)
        above.set_title(title)
        figure.legend(handles=_keys(capacity), loc="outside lower center", ncols=3, frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_requests(axes: Axes, capacity: Capacity) -> None:
    fitting = np.array([capacity.num_running(index) or np.nan for index in range(len(capacity.contexts))])
    axes.plot(capacity.contexts, fitting, color=PAPER[INK], marker="o", markersize=4, linewidth=1.6, clip_on=False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    for length, count in zip(capacity.contexts, fitting, strict=True):
        name, height = ("none", FLOOR) if math.isnan(count) else (f"{count:,.0f}", count)
        axes.annotate(name, (length, height), (3, 5), textcoords="offset points", fontsize=8)
    top = np.nanmax(fitting) if not np.isnan(fitting).all() else 1
    axes.set_ylim(FLOOR, 2.5 * top)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else "")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.set_ylabel("requests at once (log)")


def _draw_binding(axes: Axes, capacity: Capacity) -> None:
    """Draw a strip: at each length in the colour of what binds there."""
    for index, (low, high) in enumerate(_spans(capacity.contexts)):
        colour = _colours(capacity)[capacity.binding(index)]
        axes.axvspan(low, high, color=colour, linewidth=0)
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.set_ylabel("binds", rotation=0, horizontalalignment="right", verticalalignment="center")


def _draw_shares(axes: Axes, capacity: Capacity) -> None:
    shares = 100 * np.array([capacity.shares(index) for index in range(len(capacity.contexts))]).T
    axes.stackplot(capacity.contexts, shares, colors=[_colours(capacity)[name] for name in capacity.groups])
    axes.set_ylim(0, 100)
    axes.set_ylabel("a request's bytes (%)")


def _label_contexts(axes: Axes, contexts: Sequence[int]) -> None:
    shown = contexts[:: max(1, math.ceil(len(contexts) / 11))]
    axes.set_xticks(shown, labels=[tokens(length) for length in shown])
    axes.set_xticks([], minor=True)
    axes.set_xlim(contexts[0], contexts[-1] if len(contexts) > 1 else 2 * contexts[0])
    axes.set_xlabel("tokens of a request (log)")


def _spans(contexts: Sequence[int]) -> list[tuple[float, float]]:
    """Return the span around each length, up to halfway (on the logarithmic axis) to its neighbours."""
    middles = [math.sqrt(left * right) for left, right in pairwise(contexts)]
    return list(zip([contexts[0], *middles], [*middles, contexts[-1]], strict=True))


def _colours(capacity: Capacity) -> dict[str, str]:
    named = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(capacity.groups)}
    return {**named, NAME_OF_LIMIT: LIMIT_COLOUR}


def _keys(capacity: Capacity) -> list[object]:
    from matplotlib.patches import Patch

    bound = [capacity.binding(index) for index in range(len(capacity.contexts))]
    names = [*capacity.groups, *([NAME_OF_LIMIT] if NAME_OF_LIMIT in bound else [])]
    return [Patch(color=_colours(capacity)[name], label=name) for name in names]


def tokens(count: int) -> str:
    """Return a number of tokens in words: '1k' is 1,024."""
    return f"{count // 2**20}M" if count % 2**20 == 0 else f"{count // 1024}k" if count % 1024 == 0 else f"{count:,}"
