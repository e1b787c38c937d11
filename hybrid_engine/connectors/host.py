"""The memory tier: stored things by their key, under a budget of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sized
from typing import Generic, TypeVar

from hybrid_engine.transfer_plan import StoreKey

Payload = TypeVar("Payload", bound=Sized)


class HostTier(Generic[Payload]):
    """Keeps payloads until the budget is used up, then drops the least recently used.

    Windows, states and partly filled blocks are *dear*: few bytes, without which a long prefix is worth nothing, and
    the first to leave the device. They are dropped only when they take more than half of the budget, or alone are left.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self._plain: OrderedDict[StoreKey, Payload] = OrderedDict()
        self._dear: OrderedDict[StoreKey, Payload] = OrderedDict()
        self._plain_bytes = 0
        self._dear_bytes = 0

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._plain or key in self._dear

    def __len__(self) -> int:
        return len(self._plain) + len(self._dear)

    @property
    def num_bytes(self) -> int:
        """Bytes of all payloads."""
        return self._plain_bytes + self._dear_bytes

    def __iter__(self) -> Iterator[StoreKey]:
        yield from self._plain
        yield from self._dear

    def put(self, key: StoreKey, payload: Payload, *, is_dear: bool) -> list[StoreKey]:
        """Keep a payload; return the keys of what was dropped for it, its own where it alone exceeds the budget."""
        self.discard(key)
        if len(payload) > self.budget_bytes:
            return [key]
        if is_dear:
            self._dear[key] = payload
            self._dear_bytes += len(payload)
        else:
            self._plain[key] = payload
            self._plain_bytes += len(payload)
        dropped = []
        while self.num_bytes > self.budget_bytes:
            dropped.append(self._drop_one())
        return dropped

    def get(self, key: StoreKey) -> Payload | None:
        """Return a payload, from now on the most recently used, or None."""
        for tier in (self._plain, self._dear):
            if key in tier:
                tier.move_to_end(key)
                return tier[key]
        return None

    def size(self, key: StoreKey) -> int | None:
        """Return the bytes of a payload, None when it isn't here; its recency stays as it is."""
        payload = self._plain.get(key)
        if payload is None:
            payload = self._dear.get(key)
        return None if payload is None else len(payload)

    def discard(self, key: StoreKey) -> None:
        """Drop a payload if it is here."""
        if key in self._plain:
            self._plain_bytes -= len(self._plain.pop(key))
        elif key in self._dear:
            self._dear_bytes -= len(self._dear.pop(key))

    def clear(self) -> None:
        """Drop everything."""
        self._plain.clear()
        self._dear.clear()
        self._plain_bytes = self._dear_bytes = 0

    def _drop_one(self) -> StoreKey:
        if self._plain and 2 * self._dear_bytes <= self.budget_bytes:
            key, payload = self._plain.popitem(last=False)
            self._plain_bytes -= len(payload)
        else:
            key, payload = self._dear.popitem(last=False)
            self._dear_bytes -= len(payload)
        return key
