"""/cache: what the caches hold, without a word of what was asked, and forgetting it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from starlette.responses import Response

from hybrid_engine.server.api_errors import JsonResponse
from hybrid_engine.server.service import Service
from hybrid_engine.snapshot import EngineSnapshot


def add(app: FastAPI, service: Service) -> None:
    """Add the routes."""

    @app.get("/cache", response_class=JsonResponse)
    async def cache() -> Response:
        """What each group of layers holds, in blocks and bytes, and the requests that hold it."""
        return JsonResponse(describe(await service.snapshot()) | {"num_answers_in_flight": service.num_in_flight})

    @app.post("/cache/reset", response_class=JsonResponse)
    @app.post("/reset_prefix_cache", response_class=JsonResponse)
    async def reset() -> Response:
        """Forget all cached prefixes; requests that run go on."""
        await service.engine.reset_prefix_cache()
        return JsonResponse({"status": "ok"})


def describe(snapshot: EngineSnapshot) -> dict[str, Any]:
    """Return a snapshot as JSON, with bytes beside blocks."""
    found = asdict(snapshot)
    for group in found["groups"]:
        for name in ("held", "cached", "empty"):
            group[f"{name}_bytes"] = group[f"num_{name}"] * group["block_bytes"]
    return found
