"""Ctrl-C, held back while a step runs."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let what runs inside end before Ctrl-C takes effect: a step cut in two leaves caches that nobody can trust.

    A second Ctrl-C takes effect at once. Outside the main thread, where none arrives, this does nothing.
    """
    previous = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(previous):
        yield
        return
    caught: list[tuple[int, FrameType | None]] = []

    def remember(number: int, frame: FrameType | None) -> None:
        caught.append((number, frame))
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, remember)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if caught:
        previous(*caught[0])
