"""Host memory and disk as one store: what is put goes to both, what is wanted comes from the faster one."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hybrid_engine.connectors.disk import DiskTier
from hybrid_engine.connectors.host import HostTier
from hybrid_engine.transfer_plan import BlockKey, CheckpointKey, LoadId, StoreKey

NO_CHECKPOINTS: Mapping[tuple[int, ...], CheckpointKey] = {}


@dataclass(frozen=True, slots=True)
class EndedLoad:
    """How a load ended."""

    load_id: LoadId
    is_complete: bool
    seconds: float


class TieredStore:
    """What is stored, and where. Called from the scheduler's thread, the runner's and the tiers' own."""

    def __init__(self, *, host: HostTier[Any] | None, disk: DiskTier | None) -> None:
        self.host = host
        self.disk = disk
        self.plain_groups: frozenset[int] = frozenset()
        """Those whose full blocks are dropped from the host tier before anything else: they keep everything."""
        self._lock = threading.Lock()
        self._checkpoints: dict[bytes, dict[tuple[int, ...], CheckpointKey]] = {}
        self._held: dict[LoadId, dict[StoreKey, Any]] = {}
        self._ended: deque[EndedLoad] = deque()
        self.has_ended = threading.Event()
        """Set while a load has ended that nobody has taken note of."""
        if disk is not None:
            disk.on_change = self._note_change
            self._note_change(disk.keys())

    # What is here

    def __contains__(self, key: StoreKey) -> bool:
        return (self.host is not None and key in self.host) or (self.disk is not None and key in self.disk)

    def is_empty(self) -> bool:
        """Return whether nothing at all is stored."""
        return not self.host and (self.disk is None or self.disk.is_empty())

    def checkpoints_behind(self, parent: bytes) -> Mapping[tuple[int, ...], CheckpointKey]:
        """Return the stored checkpoints right behind a hash, by the tokens since."""
        return self._checkpoints.get(parent, NO_CHECKPOINTS)

    def refresh(self) -> None:
        """Take in what other processes have stored in the same folder."""
        if self.disk is not None:
            self.disk.refresh()

    def bytes_by_tier(self, keys: Iterable[StoreKey]) -> dict[str, int]:
        """Return how many bytes each tier would read for these things; those that are gone count nothing."""
        sizes = {"host": 0, "disk": 0}
        for key in keys:
            size = self.host.size(key) if self.host is not None else None
            if size is not None:
                sizes["host"] += size
            elif self.disk is not None:
                sizes["disk"] += self.disk.size(key) or 0
        return sizes

    def wants(self, key: StoreKey) -> bool:
        """Return whether some tier lacks a thing; one that is used again is the last to be dropped."""
        with self._lock:
            lacks_host = self.host is not None and self.host.get(key) is None
        return lacks_host or (self.disk is not None and key not in self.disk)

    # Bytes come and go

    def put(self, key: StoreKey, payload: Any) -> None:
        """Keep a payload; it is the store's from now on."""
        changed = [key]
        if self.host is not None:
            with self._lock:
                is_dear = not (isinstance(key, BlockKey) and key.group_id in self.plain_groups)
                changed += self.host.put(key, payload, is_dear=is_dear)
        if self.disk is not None:
            self.disk.put(key, payload)
        self._note_change(changed)

    def get(self, key: StoreKey) -> Any | None:
        """Return a payload, or None."""
        with self._lock:
            for held in self._held.values():
                if key in held:
                    return held[key]
            found = self.host.get(key) if self.host is not None else None
        return found if found is not None or self.disk is None else self.disk.get(key)

    def discard(self, key: StoreKey) -> None:
        """Forget a thing that turned out to be of no use."""
        if self.host is not None:
            with self._lock:
                self.host.discard(key)
        if self.disk is not None:
            self.disk.discard(key)
        self._note_change([key])

    def hold(self, load_id: LoadId, keys: Sequence[StoreKey]) -> None:
        """Keep what the host tier has of these until the load ends, whatever else comes meanwhile."""
        with self._lock:
            found = {key: self.host.get(key) for key in keys} if self.host is not None else {}
            self._held[load_id] = {key: payload for key, payload in found.items() if payload is not None}

    def end_load(self, load_id: LoadId, *, is_complete: bool, seconds: float) -> None:
        """Take note that a load has ended."""
        with self._lock:
            self._held.pop(load_id, None)
            self._ended.append(EndedLoad(load_id, is_complete, seconds))
            self.has_ended.set()

    def take_ended(self) -> list[EndedLoad]:
        """Return the loads that have ended since this was last asked."""
        with self._lock:
            ended = list(self._ended)
            self._ended.clear()
            self.has_ended.clear()
        return ended

    def clear(self) -> None:
        """Forget everything, files included."""
        if self.host is not None:
            with self._lock:
                self.host.clear()
        if self.disk is not None:
            self.disk.clear()
        with self._lock:
            self._checkpoints.clear()

    def flush(self) -> None:
        """Return when all that was put is where it outlives the process, if there is a disk tier."""
        if self.disk is not None:
            self.disk.flush()

    def close(self) -> None:
        """Write what waits to be written and stop the writer."""
        if self.disk is not None:
            self.disk.close()

    def _note_change(self, keys: Iterable[StoreKey]) -> None:
        """Keep the list of checkpoints what the tiers hold."""
        with self._lock:
            for key in keys:
                if not isinstance(key, CheckpointKey):
                    continue
                if key in self:
                    self._checkpoints.setdefault(key.parent, {})[key.tail] = key
                    continue
                siblings = self._checkpoints.get(key.parent)
                if siblings is not None:
                    siblings.pop(key.tail, None)
                    if not siblings:
                        del self._checkpoints[key.parent]
