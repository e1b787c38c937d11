"""Small traces made by hand, one of each format."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from small_traces import SYSTEM, call, user


@pytest.fixture
def write_trace(tmp_path) -> Callable[..., Path]:
    """Write rows as JSON lines, gzipped where the name says so."""

    def write(*rows: object, name: str = "trace.jsonl") -> Path:
        text = "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
        data = text.encode()
        path = tmp_path / name
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


@pytest.fixture
def conversations(write_trace) -> Path:
    """Two conversations of two turns with one system prompt."""
    return write_trace(
        call("a", "full", SYSTEM, user("To Rome?"), answer="On Monday at nine or at ten o'clock."),
        call("a", "delta", user("At ten, please."), answer="Booked: seat 7 C at the window."),
        call("b", "full", SYSTEM, user("To Oslo?"), answer="There is no flight on this day, I am sorry."),
        call("b", "delta", user("Then never mind."), answer="Have a nice day!"),
    )
