"""What every request passes first: who asks, how much is sent, and the line in the log. No text is ever logged."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hybrid_engine.server.api_errors import ApiError, ClientGoneError, error_response
from hybrid_engine.server.settings import ServerSettings, tenant_of

logger = logging.getLogger("hybrid_engine.access")

OPEN_PATHS = ("/health", "/version", "/metrics", "/dashboard")
"""They need no API key: they tell nothing of what is asked or answered."""
MAX_REQUEST_ID_LENGTH = 128


class Gate:
    """Lets requests pass that carry a key and are not too large; the app sees whole bodies only."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, note_refused: Callable[[str], None]) -> None:
        """note_refused: is told the code of each error."""
        self._app = app
        self._settings = settings
        self._note_refused = note_refused
        self._keys = ApiKeys(settings.api_keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, status = time.monotonic(), 499
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get("x-request-id"))

        async def note_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._pass(scope, headers, receive, note_status)
        except ClientGoneError:
            pass  # status 499, as others log it
        finally:
            if self._settings.has_access_log:
                self._log(scope, status, time.monotonic() - start, request_id)

    async def _pass(self, scope: Scope, headers: Headers, receive: Receive, send: Send) -> None:
        try:
            if scope["path"] not in OPEN_PATHS:
                scope["tenant"] = self._keys.tenant(headers.get("authorization"))
            body = await self._read(headers, receive)
        except ApiError as error:
            self._note_refused(error.code or "error")
            await error_response(error)(scope, receive, send)
            return
        await self._app(scope, _replay(body, receive), send)

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        """Return the whole body. Raises ApiError when it is too large or too slow, and ClientGoneError."""
        limit, seconds = self._settings.max_body_bytes, self._settings.body_timeout_seconds
        declared = headers.get("content-length", "0")
        if declared.isdigit() and int(declared) > limit:
            raise _too_large(limit)
        pieces: list[bytes] = []
        size, has_more = 0, True
        try:
            async with asyncio.timeout(seconds):
                while has_more:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ClientGoneError
                    pieces.append(message.get("body", b""))
                    size += len(pieces[-1])
                    if size > limit:
                        raise _too_large(limit)
                    has_more = message.get("more_body", False)
        except TimeoutError:
            raise ApiError(408, f"the request wasn't there after {seconds:g} seconds", code="body_timeout") from None
        return b"".join(pieces)

    def _log(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        tenant = scope.get("tenant") or "-"
        logger.info("%s %s %d %.3fs %s %s", scope["method"], scope["path"], status, seconds, tenant, request_id)


class ApiKeys:
    """The keys that open the gate."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._known = [(hashlib.sha256(key.encode()).digest(), tenant_of(key)) for key in keys]

    def tenant(self, authorization: str | None) -> str | None:
        """Return what stands for the client that sent this header; None where no keys are asked for.

        All keys are compared, each in the same time whatever was sent. Raises ApiError for a key that isn't one.
        """
        if not self._known:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode("utf-8", "surrogateescape")).digest()
        found = None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        if found is None or scheme.lower() != "bearer":
            raise ApiError(
                401,
                "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a receive that gives the body at once, then what comes after it: the end of the connection."""
    is_read = False

    async def replay() -> Message:
        nonlocal is_read
        if is_read:
            return await receive()
        is_read = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID_LENGTH and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def _too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit:,} bytes", code="request_too_large")
