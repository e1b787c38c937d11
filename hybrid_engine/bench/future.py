"""What is still to come of a workload: which checkpoint a later call will go on from, and when.

Told by a run with unlimited memory: in it each call hits the longest checkpoint that was ever laid for its prompt. The
next use of a checkpoint is the first call, not submitted yet, that went on from exactly it in that run; its time is the
one it had there. Sizes differ and a call whose checkpoint is gone goes on from a shorter one, so that giving up what is
used furthest in the future (Belady 1966) is a strong reference here, not a proven bound.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

from hybrid_engine.eviction.heap import ValueHeap
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.request import Request

Key = tuple[BlockHash, tuple[int, ...]]
"""A checkpoint's parent and tail."""
Call = tuple[str, int]
"""A session, and which of its calls."""


def _tell_nobody(key: Key) -> None:
    """Nobody has asked."""


class Future:
    """Who goes on from where, and when; moves on with each call that is submitted."""

    def __init__(self) -> None:
        self._uses: dict[Key, deque[tuple[float, Call]]] = {}
        self._key_of: dict[Call, Key] = {}
        self._passed: set[Call] = set()
        self.on_changed: Callable[[Key], None] = _tell_nobody
        """Told of each checkpoint whose next use has become another one."""

    def note_use(self, call: Call, request: Request, time_s: float, *, unit_tokens: int) -> None:
        """Note, while the run with unlimited memory goes on, where a call's prompt was hit."""
        if request.cache is None or not request.cache.hit:
            return
        position = request.cache.hit
        start = position // unit_tokens * unit_tokens
        key = (request.hash_at(position // unit_tokens), tuple(request.token_ids[start:position]))
        self._key_of[call] = key
        self._uses.setdefault(key, deque()).append((time_s, call))

    def restart(self) -> None:
        """Begin again: no call was submitted."""
        self._passed.clear()
        self.on_changed = _tell_nobody
        for key, uses in self._uses.items():
            self._uses[key] = deque(sorted(uses))

    def pass_call(self, call: Call) -> None:
        """Note that a call was submitted: it is no future use any more."""
        self._passed.add(call)
        key = self._key_of.get(call)
        if key is not None:
            self.on_changed(key)

    def key_of(self, session: str, turn: int) -> Key | None:
        """Return where a call was hit; None: nowhere."""
        return self._key_of.get((session, turn))

    def next_use(self, key: Key) -> float:
        """Return when a checkpoint is used next; infinity for never."""
        return next((time_s for time_s, call in self._uses.get(key, ()) if call not in self._passed), math.inf)


class ClairvoyantPolicy(EvictionPolicy):
    """What is used furthest in the future goes first, what is never used before all else; then the least recent."""

    def __init__(self, future: Future) -> None:
        self._future = future
        self._heap = ValueHeap()
        self._recorded: dict[Key, Checkpoint] = {}
        future.on_changed = self._look_again

    def record(self, checkpoint: Checkpoint) -> None:
        self._recorded[_key(checkpoint)] = checkpoint
        self._put(checkpoint)

    def use(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        self._heap.discard(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        self._put(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        self._recorded.pop(_key(checkpoint), None)
        self._heap.discard(checkpoint)

    def next_victim(self) -> Checkpoint | None:
        least = self._heap.least()
        return least[0] if least else None

    def _look_again(self, key: Key) -> None:
        checkpoint = self._recorded.get(key)
        if checkpoint is not None:
            self._put(checkpoint)

    def _put(self, checkpoint: Checkpoint) -> None:
        if not checkpoint.num_pins:
            self._heap.put(checkpoint, (-self._future.next_use(_key(checkpoint)), checkpoint.last_event))


def _key(checkpoint: Checkpoint) -> Key:
    return checkpoint.parent, checkpoint.tail
