"""Answers over HTTP: whole, or as server-sent events. Either way, a client that leaves ends its requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.server.api_errors import ApiError, ClientGoneError, as_api_error, to_json
from hybrid_engine.server.service import Answering

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(content: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


class TextEvents:
    """Events that differ in one text only: all else of them is written once."""

    MARK = "\0the text\0"

    def __init__(self, content: Any) -> None:
        """content: of such an event, with MARK in the place of the text; what a client chose stands before it."""
        self._before, mark, self._after = event(content).rpartition(to_json(self.MARK))
        assert mark, f"{content} has no mark"

    def event(self, text: str) -> bytes:
        """Return the event with this text."""
        return self._before + to_json(text) + self._after


async def while_connected(receive: Receive, answering: Answering, work: Callable[[], Awaitable[T]]) -> T:
    """Do the work, then close the answering; raises ClientGoneError when the client leaves meanwhile."""
    watcher = asyncio.create_task(_watch(receive, answering))
    try:
        return await work()
    finally:
        watcher.cancel()
        answering.close()


async def _watch(receive: Receive, answering: Answering) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    answering.abandon()


def run_until_wait(work: Awaitable[None]) -> Awaitable[None] | None:
    """Run what could be awaited until it waits; return what is left of it, to be awaited by a task, or None."""
    steps = work.__await__()
    try:
        return _Rest(next(steps), steps)
    except StopIteration:
        return None


class _Rest(Awaitable[None]):
    """What something has yet to do after what it waits for."""

    def __init__(self, waits_for: Any, steps: Generator[Any, Any, None]) -> None:
        self._waits_for = waits_for
        self._steps = steps

    def __await__(self) -> Generator[Any, Any, None]:
        yield self._waits_for
        yield from self._steps


class EventWriter(Protocol):
    """Writes an answer as events."""

    def begin(self) -> bytes:
        """Return the events that come before any news."""

    def write(self, ready: Sequence[RequestOutput]) -> bytes:
        """Return the events that tell of what is new."""

    def end(self) -> bytes:
        """Return the events that come when the answer is whole."""


class EventStream(Response):
    """A stream of events that ends what it streams as soon as nobody reads it."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, writer: EventWriter, *, ends_with_done: bool = True) -> None:
        """ends_with_done: the last event says that it is."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._answering = answering
        self._writer = writer
        self._end = DONE if ends_with_done else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. An error becomes the last of them: the status was sent long before."""

        def write(body: bytes, *, is_last: bool = False) -> Awaitable[None]:
            return send({"type": "http.response.body", "body": body, "more_body": not is_last})

        def write_news(ready: list[RequestOutput]) -> Awaitable[None] | None:
            body = self._writer.write(ready)
            return run_until_wait(write(body)) if body else None

        async def stream() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                if body := self._writer.begin():
                    await write(body)
                await self._answering.watch(write_news)
                last = self._writer.end()
            except ApiError as error:
                last = event(error.body())
            except HybridEngineError as error:
                last = event(as_api_error(error).body())
            await write(last + self._end, is_last=True)

        with suppress(ClientGoneError, OSError):
            await while_connected(receive, self._answering, stream)
