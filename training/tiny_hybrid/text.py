"""The English that is learned from, and the part of it that is held out."""

from __future__ import annotations

import lzma
from functools import cache
from pathlib import Path

PATH = Path(__file__).parent / "data" / "english.txt.xz"
RUN_PARAGRAPHS, RUNS = 40, 25
"""Every 25th run of 40 paragraphs is held out."""


@cache
def english() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return (paragraphs to train on, paragraphs held out)."""
    paragraphs = lzma.decompress(PATH.read_bytes()).decode().splitlines()
    held_out = [index // RUN_PARAGRAPHS % RUNS == RUNS - 1 for index in range(len(paragraphs))]
    train = tuple(text for text, is_out in zip(paragraphs, held_out, strict=True) if not is_out)
    return train, tuple(text for text, is_out in zip(paragraphs, held_out, strict=True) if is_out)
