"""What is still to come of a workload: which checkpoint a later call will go on from, and when.

Told by a run with unlimited memory: in it each call hits the longest checkpoint that was ever laid for its prompt. The
next use of a checkpoint is the first call, not submitted yet, that went on from exactly it in that run. Giving up what
is used furthest in the future (Belady 1966) is best where all things cost the same; here they don't, and a call whose
checkpoint is gone goes on from a shorter one, so that what it hits, sizes and costs weighed in, is a strong reference,
not a proven bound.
"""

from __future__ import annotations

import math
from bisect import insort

from hybrid_engine.eviction.sample import SamplingPolicy
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.request import Request

Key = tuple[BlockHash, tuple[int, ...]]
"""A checkpoint's parent and tail."""
Call = tuple[str, int]
"""A session, and which of its calls."""


class Future:
    """Who goes on from where, and when; moves on with each call that is submitted."""

    def __init__(self) -> None:
        self._order: dict[Call, int] = {}
        """Which of all calls it was, in the order in which they were submitted."""
        self._key_of: dict[Call, Key] = {}
        self._uses: dict[Key, list[tuple[int, Call]]] = {}
        self._passed: set[Call] = set()

    def note_call(self, call: Call) -> None:
        """Note, while the run with unlimited memory goes on, that a call was submitted."""
        self._order[call] = len(self._order)

    def note_use(self, call: Call, request: Request, *, unit_tokens: int) -> None:
        """Note, when a call of that run has ended, where its prompt was hit."""
        if request.cache is None or not request.cache.hit:
            return
        position = request.cache.hit
        start = position // unit_tokens * unit_tokens
        key = (request.hash_at(position // unit_tokens), tuple(request.token_ids[start:position]))
        self._key_of[call] = key
        insort(self._uses.setdefault(key, []), (self._order[call], call))

    def restart(self) -> None:
        """Begin again: no call was submitted."""
        self._passed.clear()

    def pass_call(self, call: Call) -> None:
        """Note that a call was submitted: it is no future use any more."""
        self._passed.add(call)

    def key_of(self, session: str, turn: int) -> Key | None:
        """Return where a call was hit; None: nowhere."""
        return self._key_of.get((session, turn))

    def num_calls_until(self, key: Key) -> float:
        """Return how many calls come until a checkpoint is used, that one counted; infinity: it never is."""
        coming = (place for place, call in self._uses.get(key, ()) if call not in self._passed)
        # Calls don't come in quite the same order: what should have come by now comes any moment.
        return max(next(coming, math.inf) - len(self._passed) + 1, 1)


class ClairvoyantPolicy(SamplingPolicy):
    """What saves least goes first: seconds to rebuild it / bytes that only it holds / calls until its next use."""

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future

    def least(self, drawn: list[Checkpoint]) -> Checkpoint:
        return min(drawn, key=lambda checkpoint: (self._worth(checkpoint), checkpoint.last_event))

    def _worth(self, checkpoint: Checkpoint) -> float:
        saved = self.facts.rebuild_seconds(checkpoint) / self.facts.own_bytes(checkpoint)
        return saved / self._future.num_calls_until(_key(checkpoint))


def _key(checkpoint: Checkpoint) -> Key:
    return checkpoint.parent, checkpoint.tail
