"""Answers over HTTP: whole, or as server-sent events. Either way, a client that leaves ends its requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hybrid_engine.errors import HybridEngineError
from hybrid_engine.server.api_errors import ApiError, ClientGoneError, as_api_error, to_json
from hybrid_engine.server.service import Answering

T = TypeVar("T")

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def event(content: Any) -> bytes:
    """Return one server-sent event."""
    return b"data: " + to_json(content) + b"\n\n"


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


class EventStream(Response):
    """A stream of events that ends what it streams as soon as nobody reads it."""

    media_type = "text/event-stream"

    def __init__(self, answering: Answering, events: AsyncIterator[bytes], *, ends_with_done: bool = True) -> None:
        """events: whole events. ends_with_done: the last one says that it is."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._answering = answering
        self._events = events
        self._end = DONE if ends_with_done else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events. An error becomes the last of them: the status was sent long before."""

        async def write(body: bytes, *, is_last: bool = False) -> None:
            await send({"type": "http.response.body", "body": body, "more_body": not is_last})

        async def stream() -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                async for piece in self._events:
                    await write(piece)
                last = self._end
            except ApiError as error:
                last = event(error.body()) + self._end
            except HybridEngineError as error:
                last = event(as_api_error(error).body()) + self._end
            await write(last, is_last=True)

        with suppress(ClientGoneError, OSError):
            await while_connected(receive, self._answering, stream)
