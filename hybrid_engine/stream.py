"""What `LLM.stream` returns: the deltas of one request, one by one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator

from hybrid_engine.outputs import RequestOutput


class DeltaStream(Iterator[RequestOutput]):
    """Iterates over what is new of one request; closing it, or dropping it, aborts the request.

    Each step that it needs runs all requests in flight, so that several streams can be read in turns.
    """

    def __init__(self, deltas: deque[RequestOutput], *, step: Callable[[], None], abort: Callable[[], None]) -> None:
        """deltas: where a step puts those of the request. step: runs one. abort: ends the request."""
        self._deltas = deltas
        self._step = step
        self._abort = abort
        self._is_over = False

    def __next__(self) -> RequestOutput:
        while not self._deltas:
            if self._is_over:
                raise StopIteration
            try:
                self._step()
            except BaseException:
                self.close()
                raise
        delta = self._deltas.popleft()
        self._is_over = self._is_over or delta.finished
        return delta

    def close(self) -> None:
        """End the request if it still runs; deltas not yet read are dropped."""
        self._deltas.clear()
        if not self._is_over:
            self._is_over = True
            self._abort()

    def __enter__(self) -> DeltaStream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()
