"""/tokenize and /detokenize, and the routes that there are not."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from hybrid_engine.server.api_errors import ApiError, JsonResponse
from hybrid_engine.server.chat import Chat
from hybrid_engine.server.protocol import DetokenizeBody, TokenizeBody
from hybrid_engine.server.service import Service

MISSING = ("/v1/embeddings", "/v1/moderations", "/v1/images/generations", "/v1/audio/speech", "/pooling", "/score")


def add(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the routes."""

    @app.post("/tokenize", response_class=JsonResponse)
    async def tokenize(body: TokenizeBody) -> Response:
        """Return the tokens of a prompt, or those that a conversation is rendered to."""
        service.check_model(body.model)
        token_ids = await _tokens(body, service, chat)
        found = {"count": len(token_ids), "max_model_len": service.engine.max_model_len, "tokens": token_ids}
        if body.return_token_strs:
            found["token_strs"] = await service.text.token_texts(token_ids)
        return JsonResponse(found)

    @app.post("/detokenize", response_class=JsonResponse)
    async def detokenize(body: DetokenizeBody) -> Response:
        """Return the text of tokens."""
        service.check_model(body.model)
        service.check_token_ids("tokens", body.tokens)
        return JsonResponse({"prompt": await service.text.decode(body.tokens)})

    async def refuse(request: Request) -> Response:
        """There is no such thing here."""
        raise ApiError(501, f"{request.url.path}: this server generates text and nothing else", code="not_implemented")

    for path in MISSING:
        app.add_api_route(path, refuse, methods=["POST"], include_in_schema=False)


async def _tokens(body: TokenizeBody, service: Service, chat: Chat) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", code="invalid_value", param="prompt")
    if body.prompt is not None:
        return await service.text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)
    return (await chat.render(body))["prompt_token_ids"]
