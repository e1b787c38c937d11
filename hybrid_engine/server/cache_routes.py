"""/cache: what the caches hold, without a word of what was asked; forgetting it, keeping it, bringing it back."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from hybrid_engine.engine import Engine
from hybrid_engine.server.api_errors import ApiError, JsonResponse
from hybrid_engine.server.chat import Chat
from hybrid_engine.server.pins import PinnedPrefixes
from hybrid_engine.server.prefill import compute_prefix, compute_tokens, prefix_tokens
from hybrid_engine.server.protocol import PinBody, PrefixBody
from hybrid_engine.server.service import Service
from hybrid_engine.snapshot import EngineSnapshot

NUM_TOP_PREFIXES = 20


def add(app: FastAPI, service: Service, chat: Chat) -> None:
    """Add the routes."""
    pins = PinnedPrefixes(service)

    @app.get("/cache", response_class=JsonResponse)
    async def cache(request: Request) -> Response:
        """What each group of layers holds, the requests that hold it, and the prefixes that were of most use."""
        found = describe(await service.snapshot())
        tiers = await service.engine.call(Engine.tier_stats)
        return JsonResponse(
            found
            | {
                "num_answers_in_flight": service.num_in_flight,
                "tiers": None if tiers is None else asdict(tiers),
                "pins": pins.list(tenant_of(request)),
                "top_prefixes": service.prefixes.top(
                    NUM_TOP_PREFIXES, may_see=partial(service.is_own_salt, tenant_of(request))
                ),
            }
        )

    @app.post("/cache/reset", response_class=JsonResponse)
    @app.post("/reset_prefix_cache", response_class=JsonResponse)
    async def reset() -> Response:
        """Forget all cached prefixes; requests that run go on."""
        await service.engine.reset_prefix_cache()
        service.prefixes.clear()
        pins.clear()
        return JsonResponse({"status": "ok"})

    @app.post("/cache/save", response_class=JsonResponse)
    async def save(body: PrefixBody, request: Request) -> Response:
        """Have the disk cache keep a session, or all that is cached: it outlives the process."""
        await _require_disk(service)
        found = {} if body.is_empty else await compute_prefix(service, chat, body, request)
        await service.engine.call(Engine.flush_cache)
        tiers = await service.engine.call(Engine.tier_stats)
        assert tiers is not None
        return JsonResponse(found | {"disk_bytes": tiers.disk_bytes})

    @app.post("/cache/restore", response_class=JsonResponse)
    async def restore(body: PrefixBody, request: Request) -> Response:
        """Bring a session back into the caches, from host memory or disk; what is missing there is computed."""
        if body.is_empty:
            raise ApiError(
                400, "give prompt or messages: what is to be restored?", code="invalid_value", param="prompt"
            )
        return JsonResponse(await compute_prefix(service, chat, body, request))

    @app.post("/cache/pins", response_class=JsonResponse)
    async def pin(body: PinBody, request: Request) -> Response:
        """Keep a prefix cached, computing it if need be, until it is let go or the cache is reset."""
        tenant = tenant_of(request)
        token_ids, boundaries = await prefix_tokens(service, chat, body)
        name = pins.claim(tenant, body.name)
        try:
            usage = await compute_tokens(service, body, token_ids, boundaries, request)
            pinned = await pins.pin(tenant, name, token_ids, service.salt(tenant, body.cache_salt))
        finally:
            pins.let_go_of_claim(tenant, name)
        return JsonResponse({"name": name, "num_tokens": pinned.num_tokens, "usage": usage})

    @app.delete("/cache/pins/{name:path}", response_class=JsonResponse)
    async def unpin(name: str, request: Request) -> Response:
        """Let a pinned prefix go the way of all others."""
        await pins.unpin(tenant_of(request), name)
        return JsonResponse({"name": name})


def tenant_of(request: Request) -> str | None:
    """Return what stands for the client, as the gate found it."""
    return request.scope.get("tenant")


async def _require_disk(service: Service) -> None:
    tiers = await service.engine.call(Engine.tier_stats)
    if tiers is None or not tiers.has_disk:
        raise ApiError(400, "there is no disk cache: start the server with --disk-cache FOLDER", code="no_disk_cache")


def describe(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON, with bytes beside blocks."""
    found = asdict(snapshot)
    for group in found["groups"]:
        for name in ("held", "cached", "empty"):
            group[f"{name}_bytes"] = group[f"num_{name}"] * group["block_bytes"]
    return found
