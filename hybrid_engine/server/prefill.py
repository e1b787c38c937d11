"""Computes a prefix for requests to come, and says where its tokens came from."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request

from hybrid_engine.engine import Prompt
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.server.api_errors import ApiError
from hybrid_engine.server.chat import Chat
from hybrid_engine.server.events import while_connected
from hybrid_engine.server.protocol import PrefixBody
from hybrid_engine.server.service import Service
from hybrid_engine.server.usage import Usage


async def compute_prefix(service: Service, chat: Chat, body: PrefixBody, request: Request) -> dict[str, Any]:
    """Compute what a body names, or find it in the caches; return its usage."""
    return await compute_tokens(service, body, *await prefix_tokens(service, chat, body), request)


async def compute_tokens(
    service: Service, body: PrefixBody, token_ids: list[int], boundaries: Sequence[int], request: Request
) -> dict[str, Any]:
    """The same, of tokens that are known."""
    prompt = Prompt(
        f"prefix-{uuid.uuid4().hex}",
        token_ids,
        SamplingParams(max_tokens=1, temperature=0, ignore_eos=True),
        cache_salt=service.salt(request.scope.get("tenant"), body.cache_salt),
        message_boundaries=boundaries,
    )
    answering = await service.submit([prompt], timeout_seconds=body.timeout_seconds)
    usage = Usage()

    async def collect() -> None:
        while ready := await answering.read():
            for delta in ready:
                usage.add(delta)

    await while_connected(request.receive, answering, collect)
    return usage.body(explains=True, has_answer=False)


async def prefix_tokens(service: Service, chat: Chat, body: PrefixBody) -> tuple[list[int], Sequence[int]]:
    """Return the tokens that a body names, and where messages end in them. Raises ApiError for none or both."""
    service.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", code="invalid_value", param="prompt")
    if body.messages is not None:
        rendered = await chat.render(body)
        return rendered["prompt_token_ids"], rendered["message_boundaries"]
    assert body.prompt is not None
    if isinstance(body.prompt, str):
        return await service.text.encode(body.prompt), ()
    service.check_token_ids("prompt", body.prompt)
    return body.prompt, ()
