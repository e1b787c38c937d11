"""Who may use an engine, one thread at a time."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from hybrid_engine.engine import Engine


class EngineTurns:
    """An engine that threads use in turns."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._turn = threading.RLock()
        self._unwanted: deque[str] = deque()

    @contextmanager
    def take(self) -> Iterator[Engine]:
        """Let no other thread at the engine meanwhile."""
        try:
            with self._turn:
                yield self._engine
        finally:
            self._abort_unwanted()

    def abort(self, request_id: str) -> None:
        """End a request that nobody waits for, at the end of the turn that another thread has, if one has it."""
        self._unwanted.append(request_id)
        self._abort_unwanted()

    def _abort_unwanted(self) -> None:
        """End requests that nobody waits for, unless another thread has its turn: that one does it when it is done.

        Waiting is out of the question: the garbage collector may come here at any moment, holding whatever it is.
        """
        while self._unwanted and self._turn.acquire(blocking=False):
            try:
                with suppress(IndexError):  # the garbage collector came here in between
                    while True:
                        self._engine.abort(self._unwanted.popleft())
            finally:
                self._turn.release()
