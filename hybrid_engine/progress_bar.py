"""The progress bar of the Python API."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(wanted: bool | None) -> Progress:
    """Return a bar on the error stream; wanted: None: where that is a terminal."""
    is_shown = sys.stderr.isatty() if wanted is None else wanted
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )
