"""Prefixes that clients have pinned: they stay cached until they are let go, or the cache is reset."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

from hybrid_engine.engine import Engine
from hybrid_engine.pinning import Pin, pin_prefix
from hybrid_engine.server.api_errors import ApiError
from hybrid_engine.server.service import Service


class PinnedPrefixes:
    """The pins of all clients; each sees and lets go its own alone."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._pins: dict[tuple[str | None, str], Pin | None] = {}
        """By client and name; None while one is being pinned."""

    def list(self, tenant: str | None) -> list[dict[str, Any]]:
        """Return a client's pins, without their text."""
        found = [(name, pin) for (owner, name), pin in self._pins.items() if owner == tenant and pin is not None]
        return [{"name": name, "num_tokens": pin.num_tokens} for name, pin in found]

    def claim(self, tenant: str | None, name: str | None) -> str:
        """Take a name, or make one up. Raises ApiError when it is taken."""
        name = name or uuid.uuid4().hex
        if (tenant, name) in self._pins:
            raise ApiError(
                409, f"name is {name!r:.100}, which is pinned already: let it go, or choose another", code="name_taken"
            )
        self._pins[tenant, name] = None
        return name

    def let_go_of_claim(self, tenant: str | None, name: str) -> None:
        """Give a name back under which nothing was pinned after all."""
        if self._pins.get((tenant, name)) is None:
            self._pins.pop((tenant, name), None)

    async def pin(self, tenant: str | None, name: str, token_ids: Sequence[int], salt: str) -> Pin:
        """Pin what is cached of a prefix under a name that was claimed.

        Raises RequestError when the longest request would have no place beside it, ApiError when nothing is cached.
        """

        def pin_it(engine: Engine) -> Pin | None:
            return pin_prefix(
                engine.scheduler, token_ids, name=name, cache_salt=salt, max_model_len=engine.max_model_len
            )

        pin = await self._service.engine.call(pin_it)
        if pin is None:
            raise ApiError(
                409,
                f"nothing of the prefix's {len(token_ids)} tokens is cached: it is shorter than a block, caching is "
                f"off, or the memory is full of running requests",
                code="not_cached",
            )
        self._pins[tenant, name] = pin
        return pin

    async def unpin(self, tenant: str | None, name: str) -> None:
        """Let a prefix go the way of all others. Raises ApiError for a name that there isn't."""
        pin = self._pins.get((tenant, name))
        if pin is None:
            raise ApiError(404, f"nothing is pinned as {name!r:.100}", code="not_found", param="name")
        del self._pins[tenant, name]
        await self._service.engine.call(partial(_release, pin))

    def clear(self) -> None:
        """Forget all: the cache was reset, and nothing is pinned any more."""
        self._pins.clear()


def _release(pin: Pin, engine: Engine) -> None:
    engine.scheduler.coordinator.pins.release(pin.prefix)
