"""What goes wrong, in the form that OpenAI's clients know."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from hybrid_engine.errors import ChatTemplateError, EngineDeadError, HybridEngineError, PromptTooLongError, RequestError

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    501: "not_implemented_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_ENCODER = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False)


class ApiError(Exception):
    """An answer with an error status."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """code: a short word for programs. param: the field of the request that is wrong."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """Return what the client gets."""
        error_type = TYPES.get(self.status, "server_error")
        return {"error": {"message": str(self), "type": error_type, "param": self.param, "code": self.code}}


class ClientGoneError(Exception):
    """The client closed its connection: nobody reads what would be answered."""


def as_api_error(error: HybridEngineError) -> ApiError:
    """Return what a client is told of an error of the engine."""
    if isinstance(error, PromptTooLongError):
        return ApiError(400, str(error), code="context_length_exceeded", param="prompt")
    if isinstance(error, ChatTemplateError):
        return ApiError(400, str(error), code="chat_template_error", param="messages")
    if isinstance(error, RequestError):
        return ApiError(400, str(error), code="invalid_value")
    if isinstance(error, EngineDeadError):
        return ApiError(503, f"the engine is down: {error}", code="engine_dead")
    return ApiError(500, f"{type(error).__name__}: {error}", code="internal_error")


def to_json(content: Any) -> bytes:
    """Return compact JSON. A text that is no valid Unicode keeps what is valid of it."""
    return _ENCODER.encode(content).encode("utf-8", "replace")


class JsonResponse(Response):
    """A JSON answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Write the body."""
        return to_json(content)


def error_response(error: ApiError) -> JsonResponse:
    """Return the HTTP answer for an error."""
    return JsonResponse(error.body(), error.status, headers=error.headers)
