"""Moves bytes between the cache and a store: out at the start of a step, in while the steps of others run.

The payload of a full block is its bytes, that of a checkpoint the bytes of its parts, one after the other.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from hybrid_engine.runner.block_bytes import BlockBytes
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.transfer_plan import BlockKey, Load, LoadId, StoreKey, Transfer

logger = logging.getLogger(__name__)

BATCH_BYTES = 16 << 20
"""Blocks of one group are moved together, up to so many bytes at once."""


class ByteStore(Protocol):
    """Where bytes go and come from. Called from the thread that runs steps and from the one that loads."""

    def put(self, key: StoreKey, payload: np.ndarray) -> None:
        """Keep a payload, uint8; it is the store's from now on."""

    def get(self, key: StoreKey) -> np.ndarray | None:
        """Return a payload, uint8, proven to be what was put; None when it is gone."""

    def discard(self, key: StoreKey) -> None:
        """Forget a thing that turned out to be of no use."""

    def end_load(self, load_id: LoadId, *, is_complete: bool, seconds: float) -> None:
        """Take note that a load has ended; is_complete: all its things are in their blocks."""


class Transfers:
    """Executes the saves and loads that plans list."""

    def __init__(self, cache: CacheTensors, store: ByteStore) -> None:
        self._bytes = BlockBytes(cache)
        self._store = store
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="cache-loads")

    def save(self, saves: Sequence[Transfer]) -> None:
        """Copy blocks out; when this returns they may be overwritten."""
        for group_id, batch in self._batches(saves):
            rows = self._bytes.read_blocks(group_id, [transfer.parts[0].block_id for transfer in batch])
            for transfer, row in zip(batch, rows, strict=True):
                # A copy: a row would keep the whole batch in memory.
                self._store.put(transfer.key, row.copy())
        for transfer in saves:
            if not isinstance(transfer.key, BlockKey):
                self._store.put(transfer.key, np.concatenate([self._bytes.read_part(part) for part in transfer.parts]))

    def start(self, load: Load) -> None:
        """Begin to write stored things into their blocks, in a thread of its own, after the loads begun before."""
        self._loader.submit(self._run, load)

    def close(self) -> None:
        """Let the load that runs end and give up those that wait."""
        self._loader.shutdown(cancel_futures=True)

    def _run(self, load: Load) -> None:
        is_complete = False
        start = time.perf_counter()
        try:
            is_complete = self._load(load.transfers)
        except Exception:
            logger.exception("%d stored blocks could not be loaded", len(load.transfers))
            raise
        finally:
            # Whatever went wrong, the request that waits must learn of it: it computes instead.
            seconds = time.perf_counter() - start
            self._store.end_load(load.load_id, is_complete=is_complete, seconds=seconds)

    def _load(self, transfers: Sequence[Transfer]) -> bool:
        """Write all things into their blocks; return False as soon as one is gone."""
        for group_id, batch in self._batches(transfers):
            payloads = [self._get(transfer) for transfer in batch]
            found = [payload for payload in payloads if payload is not None]
            if len(found) < len(batch):
                return False
            self._bytes.write_blocks(group_id, [transfer.parts[0].block_id for transfer in batch], np.stack(found))
        for transfer in transfers:
            if not isinstance(transfer.key, BlockKey):
                payload = self._get(transfer)
                if payload is None:
                    return False
                self._write_parts(transfer, payload)
        return True

    def _get(self, transfer: Transfer) -> np.ndarray | None:
        payload = self._store.get(transfer.key)
        num_bytes = self._transfer_bytes(transfer)
        if payload is not None and len(payload) != num_bytes:
            logger.warning("%s has %d bytes, should have %d: not used", transfer.key.name, len(payload), num_bytes)
            self._store.discard(transfer.key)
            return None
        return payload

    def _transfer_bytes(self, transfer: Transfer) -> int:
        if isinstance(transfer.key, BlockKey):
            return self._bytes.block_bytes(transfer.key.group_id)
        return sum(map(self._bytes.part_bytes, transfer.parts))

    def _write_parts(self, transfer: Transfer, payload: np.ndarray) -> None:
        offset = 0
        for part in transfer.parts:
            end = offset + self._bytes.part_bytes(part)
            self._bytes.write_part(part, payload[offset:end])
            offset = end

    def _batches(self, transfers: Sequence[Transfer]) -> Iterator[tuple[int, list[Transfer]]]:
        """Split the full blocks by group, and into batches of bounded size."""
        by_group: dict[int, list[Transfer]] = {}
        for transfer in transfers:
            if isinstance(transfer.key, BlockKey):
                by_group.setdefault(transfer.key.group_id, []).append(transfer)
        for group_id, of_group in by_group.items():
            size = max(1, BATCH_BYTES // self._bytes.block_bytes(group_id))
            for start in range(0, len(of_group), size):
                yield group_id, of_group[start : start + size]
