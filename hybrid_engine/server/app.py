"""The routes."""

from __future__ import annotations

import difflib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from hybrid_engine import __version__
from hybrid_engine.async_engine import AsyncEngine
from hybrid_engine.errors import HybridEngineError
from hybrid_engine.server import cache_routes, text_routes
from hybrid_engine.server.api_errors import ApiError, ClientGoneError, JsonResponse, as_api_error, error_response
from hybrid_engine.server.chat import Chat
from hybrid_engine.server.completions import complete
from hybrid_engine.server.gate import Gate
from hybrid_engine.server.parsing.families import find_family
from hybrid_engine.server.protocol import ChatBody, CompletionBody, ResponsesBody
from hybrid_engine.server.responses import respond
from hybrid_engine.server.service import Service
from hybrid_engine.server.settings import ServerSettings

logger = logging.getLogger(__name__)

DASHBOARD = Path(__file__).parent / "dashboard.html"
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def create_app(engine: AsyncEngine, settings: ServerSettings) -> FastAPI:
    """Return the app around an engine that was not started: it starts with the app and ends with it.

    Raises ConfigError for a parser that doesn't exist.
    """
    service = Service(engine, settings)
    family = find_family(
        service.text.template_text,
        tool_parser=settings.tool_parser,
        reasoning_parser=settings.reasoning_parser,
        special_tokens=service.text.special_tokens,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        engine.start(news_interval_seconds=settings.stream_interval_seconds)
        yield
        await engine.close()
        service.close()

    app = FastAPI(title="hybrid-engine", version=__version__, lifespan=lifespan)
    app.state.service = service
    _add_errors(app, service)
    _add_state_routes(app, service)
    chat = Chat(service, family)
    _add_completion_routes(app, service, chat)
    text_routes.add(app, service, chat)
    if settings.is_admin_open:
        cache_routes.add(app, service, chat)
    app.add_middleware(Gate, settings=settings, note_refused=service.metrics.note_refused)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins, allow_methods=["*"], allow_headers=["*"]
        )
    return app


def tenant_of_request(request: Request) -> str | None:
    """Return what stands for the client, as the gate found it."""
    return request.scope.get("tenant")


def _add_completion_routes(app: FastAPI, service: Service, chat: Chat) -> None:
    @app.post("/v1/completions", response_class=JsonResponse)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Complete prompts: texts or token ids."""
        return await complete(service, body, request, tenant_of_request(request))

    @app.post("/v1/chat/completions", response_class=JsonResponse)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation."""
        return await chat.answer(body, request, tenant_of_request(request))

    @app.post("/v1/responses", response_class=JsonResponse)
    async def responses(body: ResponsesBody, request: Request) -> Response:
        """Answer a conversation, in OpenAI's newer form."""
        return await respond(chat, body, request, tenant_of_request(request))


def _add_state_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health", response_class=JsonResponse)
    async def health() -> Response:
        """200 while the engine lives, 503 once it is dead."""
        if service.engine.failure is not None:
            raise as_api_error(service.engine.failure)
        return JsonResponse({"status": "ok"})

    @app.get("/version", response_class=JsonResponse)
    async def version() -> Response:
        """The version of hybrid-engine."""
        return JsonResponse({"version": __version__})

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        return Response(service.metrics.text(await service.snapshot()), media_type=METRICS_TYPE)

    @app.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> Response:
        """A page that shows the metrics as they change."""
        return HTMLResponse(DASHBOARD.read_text())

    @app.get("/v1/models", response_class=JsonResponse)
    async def models() -> Response:
        """The model, under all its names."""
        return JsonResponse(
            {"object": "list", "data": [_model(service, name) for name in service.settings.model_names]}
        )

    @app.get("/v1/models/{name:path}", response_class=JsonResponse)
    async def model(name: str) -> Response:
        """One name of the model."""
        return JsonResponse(_model(service, service.check_model(name)))


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.start_time,
        "owned_by": "hybrid-engine",
        "root": service.settings.model_name,
        "max_model_len": service.engine.max_model_len,
    }


def _add_errors(app: FastAPI, service: Service) -> None:
    def answer(error: ApiError) -> Response:
        service.metrics.note_refused(error.code or "error")
        return error_response(error)

    async def on_api_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def on_engine_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HybridEngineError)
        return answer(as_api_error(error))

    async def on_invalid(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(_invalid(error.errors(), error.body))

    async def on_http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = str(error.detail)
        if error.status_code == 404:
            message = f"there is no {request.url.path} here; /docs lists what there is"
        return answer(ApiError(error.status_code, message, code="http_error", headers=error.headers))

    async def on_gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def on_unexpected(request: Request, error: Exception) -> Response:
        return answer(ApiError(500, "something went wrong in the server; its log says what", code="internal_error"))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(HybridEngineError, on_engine_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(ClientGoneError, on_gone)
    app.add_exception_handler(Exception, on_unexpected)


def _invalid(errors: Sequence[Any], body: Any) -> ApiError:
    """Say of the first fields that are wrong what they are and what they must be."""
    texts = [_invalid_field(error) for error in errors[:3]]
    where = _path(errors[0]["loc"])
    code = "unknown_field" if errors[0]["type"] == "extra_forbidden" else "invalid_value"
    return ApiError(400, "; ".join(texts), code=code, param=where)


def _invalid_field(error: Any) -> str:
    where, kind = _path(error["loc"]), error["type"]
    if kind == "extra_forbidden":
        near = difflib.get_close_matches(
            where, [*CompletionBody.model_fields, *ChatBody.model_fields, *ResponsesBody.model_fields], n=1
        )
        return f"{where} is no field that is known here" + (f"; did you mean {near[0]!r}?" if near else "")
    if kind == "json_invalid":
        return f"the body is no JSON: {error.get('ctx', {}).get('error', error['msg'])}"
    if kind == "missing":
        return f"{where} is missing"
    return f"{where} is {error['input']!r:.60}: {error['msg'][:1].lower()}{error['msg'][1:]}"


def _path(location: Sequence[Any]) -> str:
    """Write where in the body a field is: 'messages[0].role'."""
    parts = [part for part in location if part != "body"]
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return text.removeprefix(".") or "the body"
