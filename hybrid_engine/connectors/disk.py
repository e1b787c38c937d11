"""The disk tier: a folder of segments that outlives the process, and that several processes may share.

Whatever is put here is readable at once, from memory, and written by a thread of its own a little later, many things
to a file. Files never change; they come, by a rename, and go. One that can't be read is a miss, with a line in the log.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from hybrid_engine.connectors.segment import (
    SUFFIX,
    Place,
    Segment,
    SegmentError,
    is_segment_name,
    read_payload,
    read_segment,
    write_segment,
)
from hybrid_engine.transfer_plan import StoreKey

logger = logging.getLogger(__name__)

SEGMENT_BYTES = 8 << 20
"""A file is closed when it holds so much: few files, and little lost with a bad one."""
GATHER_SECONDS = 0.05
"""So long the writer waits for more to come into the same file."""
MAX_PENDING_BYTES = 256 << 20
"""What waits to be written takes at most so much memory; what comes on top is not stored."""

TICK_NS = 50_000_000
"""Longer than any file system's clock stands still."""


class DiskTier:
    """Stored things in files, the least recently used file dropped first. Safe to call from several threads."""

    def __init__(
        self,
        folder: Path,
        *,
        secret: bytes,
        capacity_bytes: int,
    ) -> None:
        """Take in what lies in the folder. Raises OSError when it can't be read. secret: proves files."""
        self.folder = folder
        self.capacity_bytes = capacity_bytes
        self.on_change: Callable[[Iterable[StoreKey]], None] = lambda keys: None
        """Told of things that have come or gone, from any thread, while no lock of the tier is held."""
        self._secret = secret
        self._lock = threading.Lock()
        self._has_work = threading.Condition(self._lock)
        self._places: dict[StoreKey, tuple[str, Place]] = {}
        self._segments: OrderedDict[str, Segment] = OrderedDict()
        self._ignored: set[str] = set()
        self._num_bytes = 0
        self._pending: OrderedDict[StoreKey, np.ndarray] = OrderedDict()
        self._pending_bytes = 0
        self._num_writing = 0
        self._is_closed = False
        self._has_failed = False
        self._folder_time = 0
        self._reported: set[str] = set()
        self.num_not_stored = 0
        """Things that came faster than the disk could take them, or that it refused."""
        _remove_leftovers(folder)
        self.refresh()
        self._writer = threading.Thread(target=self._write_all, name="cache-writer", daemon=True)
        self._writer.start()

    def __contains__(self, key: StoreKey) -> bool:
        return key in self._places or key in self._pending

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return self._num_bytes

    def is_empty(self) -> bool:
        """Return whether nothing is kept or about to be written."""
        return not self._places and not self._pending

    def keys(self) -> list[StoreKey]:
        """Return the keys of all that is kept or about to be written."""
        with self._lock:
            return [*self._places, *self._pending]

    def size(self, key: StoreKey) -> int | None:
        """Return the bytes of a thing, None when it isn't here."""
        with self._lock:
            if key in self._pending:
                return len(self._pending[key])
            found = self._places.get(key)
            return found[1].num_bytes if found else None

    # Bytes come and go

    def put(self, key: StoreKey, payload: np.ndarray) -> bool:
        """Have a payload written, unless it is here; return whether it is or will be."""
        with self._lock:
            if key in self._places or key in self._pending:
                return True
            if self._pending_bytes + len(payload) > MAX_PENDING_BYTES or self._has_failed or self._is_closed:
                self.num_not_stored += 1
                return False
            self._pending[key] = payload
            self._pending_bytes += len(payload)
            self._has_work.notify_all()
        return True

    def get(self, key: StoreKey) -> np.ndarray | None:
        """Return a payload that is proven to be what was put, or None."""
        with self._lock:
            if key in self._pending:
                return self._pending[key]
            found = self._places.get(key)
            if found is None:
                return None
            name, place = found
            is_latest = next(reversed(self._segments)) == name
            self._segments.move_to_end(name)
        path = self.folder / name
        try:
            payload = read_payload(path, key, place, secret=self._secret)
            if not is_latest:
                os.utime(path)  # other processes, and the next start, see what is in use
        except FileNotFoundError:
            self._forget([name])  # another process needed the room
            return None
        except (SegmentError, OSError) as error:
            logger.warning("cache file %s is dropped: %s", path, error)
            self._drop([name])
            return None
        return payload

    def discard(self, key: StoreKey) -> None:
        """Remove the file that a thing lies in: it isn't what it should be."""
        with self._lock:
            found = self._places.get(key)
        if found is not None:
            self._drop([found[0]])

    def flush(self) -> None:
        """Return when all that was put before is on the disk (or was refused by it)."""
        with self._lock:
            while self._pending or self._num_writing:
                self._has_work.notify_all()
                self._has_work.wait(GATHER_SECONDS)
                if not self._writer.is_alive():
                    return

    def clear(self) -> None:
        """Remove all files and all that waits to be written."""
        self.flush()
        self._drop(list(self._segments))

    def close(self) -> None:
        """Write what waits and end the writer; nothing can be put afterwards."""
        with self._lock:
            self._is_closed = True
            self._has_work.notify_all()
        self._writer.join()

    # Files come and go

    def refresh(self) -> None:
        """Take in the files that other processes have written since, and forget those they removed."""
        try:
            changed = os.stat(self.folder).st_mtime_ns
            if changed == self._folder_time:
                return
            names = {entry.name for entry in os.scandir(self.folder) if entry.name.endswith(SUFFIX)}
        except OSError as error:
            self._report_once(f"the disk cache in {self.folder} can't be listed: {error}")
            return
        new = names - self._segments.keys() - self._ignored
        for name in sorted(new, key=self._use_time):
            self._take_in(name)
        self._forget([name for name in list(self._segments) if name not in names])
        # What comes in the same tick of the clock as the last file seen would be missed for ever.
        self._folder_time = changed if time.time_ns() - changed > TICK_NS else 0

    def _use_time(self, name: str) -> int:
        try:
            return os.stat(self.folder / name).st_mtime_ns
        except OSError:
            return 0

    def _report_once(self, message: str) -> None:
        if message not in self._reported:
            self._reported.add(message)
            logger.error(message)

    def _take_in(self, name: str) -> None:
        path = self.folder / name
        try:
            if not is_segment_name(name):
                raise SegmentError("its name isn't one of ours")
            segment = read_segment(path)
        except FileNotFoundError:
            return
        except (SegmentError, OSError) as error:
            logger.warning("cache file %s is not used: %s", path, error)
            self._ignored.add(name)
            if is_segment_name(name):
                self._drop([name])
            return
        self._add(segment)

    def _add(self, segment: Segment, written: Iterable[StoreKey] = ()) -> None:
        with self._lock:
            for key in written:
                payload = self._pending.pop(key, None)
                self._pending_bytes -= len(payload) if payload is not None else 0
            if segment.name not in self._segments:
                self._segments[segment.name] = segment
                self._num_bytes += segment.num_bytes
                self._places.update({key: (segment.name, place) for key, place in segment.places.items()})
            dropped = []
            excess = self._num_bytes - self.capacity_bytes
            for name, each in self._segments.items():
                if excess <= 0:
                    break
                dropped.append(name)
                excess -= each.num_bytes
        self.on_change(segment.places)
        self._drop(dropped)

    def _drop(self, names: Iterable[str]) -> None:
        """Remove files."""
        names = list(names)
        for name in names:
            try:
                (self.folder / name).unlink(missing_ok=True)
            except OSError as error:
                logger.warning("cache file %s can't be removed: %s", self.folder / name, error)
                self._ignored.add(name)
        self._forget(names)

    def _forget(self, names: Iterable[str]) -> None:
        gone: list[StoreKey] = []
        with self._lock:
            for name in names:
                segment = self._segments.pop(name, None)
                if segment is not None:
                    self._num_bytes -= segment.num_bytes
                    gone += [key for key in segment.places if self._places.get(key, ("",))[0] == name]
            for key in gone:
                del self._places[key]
        if gone:
            self.on_change(gone)

    # The writer's thread

    def _write_all(self) -> None:
        while batch := self._next_batch():
            try:
                segment = write_segment(self.folder, batch, secret=self._secret)
            except OSError as error:
                self._give_up(error)
            else:
                self._add(segment, written=[key for key, _ in batch])
            with self._lock:
                self._num_writing = 0
                self._has_work.notify_all()

    def _next_batch(self) -> list[tuple[StoreKey, np.ndarray]]:
        """Wait until there is something to write; empty: the tier is closed and all is written."""
        with self._lock:
            while not self._pending and not self._is_closed:
                self._has_work.wait()
            if self._pending_bytes < SEGMENT_BYTES and not self._is_closed:
                self._has_work.wait(GATHER_SECONDS)
            batch: list[tuple[StoreKey, np.ndarray]] = []
            num_bytes = 0
            for key, payload in self._pending.items():
                batch.append((key, payload))
                num_bytes += len(payload)
                if num_bytes >= SEGMENT_BYTES:
                    break
            self._num_writing = len(batch)
            return batch

    def _give_up(self, error: OSError) -> None:
        """Forget all that waits to be written."""
        # A file that somebody removed half-written says nothing of the disk.
        is_final = not isinstance(error, FileNotFoundError)
        self._report_once(
            f"the disk cache in {self.folder} {'takes nothing more' if is_final else 'lost a file'}: {error}"
        )
        with self._lock:
            self._has_failed = is_final
            gone = list(self._pending)
            self.num_not_stored += len(gone)
            self._pending.clear()
            self._pending_bytes = 0
        self.on_change(gone)


def _remove_leftovers(folder: Path) -> None:
    """Remove what processes that are no more had begun to write."""
    for path in folder.glob(f".*{SUFFIX}.*.tmp"):
        writer = path.name.removesuffix(".tmp").rpartition(".")[2]
        if not (writer.isdecimal() and _is_alive(int(writer))):
            path.unlink(missing_ok=True)


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is somebody else's
        return True
    return True
