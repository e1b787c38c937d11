"""What is still to come of a workload: which checkpoint a later call will go on from, and when.

Told by a run with unlimited memory: in it each call hits the longest checkpoint that was ever laid for its prompt, and
is a use of that one. While that checkpoint is gone the use is one of the longest checkpoint that is left on the way to
it, which the call would then go on from; so that what comes before the end of a conversation is worth something as
soon as the end was given up. Giving up what is used furthest in the future (Belady 1966) is best where all things cost
the same; here they don't, and sizes and costs are weighed in by a rule, so that what it hits is a strong reference, not
a proven bound. The infinite cache is one.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from hybrid_engine.eviction.sample import SamplingPolicy
from hybrid_engine.groups.checkpoint_tree import Path
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.request import Request

Key = tuple[BlockHash, tuple[int, ...]]
"""A checkpoint's parent and tail."""
Call = tuple[str, int]
"""A session, and which of its calls."""
Use = tuple[int, Call]
"""A call, and which of all calls it is in the order in which they are submitted."""


class Future:
    """Who goes on from where, and when; moves on with each call that is submitted."""

    def __init__(self) -> None:
        self._order: dict[Call, int] = {}
        self._key_of: dict[Call, Key] = {}
        self._hit_of: dict[Call, tuple[Path, int]] = {}
        """A call's prompt, and how many of its tokens were hit."""
        self._uses: dict[Key, list[Use]] = {}
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
        self._hit_of[call] = Path(request.root_hash, request.block_hashes, request.token_ids), position
        self._uses.setdefault(key, []).append((self._order[call], call))

    def restart(self) -> None:
        """Begin again: no call was submitted."""
        self._passed.clear()

    def pass_call(self, call: Call) -> None:
        """Note that a call was submitted: it is no future use any more."""
        self._passed.add(call)

    def key_of(self, session: str, turn: int) -> Key | None:
        """Return where a call was hit; None: nowhere."""
        return self._key_of.get((session, turn))

    def uses_of(self, key: Key) -> Iterator[Use]:
        """Iterate over the uses of exactly this checkpoint that are still to come."""
        return (use for use in self._uses.get(key, ()) if not self.has_passed(use))

    def has_passed(self, use: Use) -> bool:
        """Return whether the call was submitted."""
        return use[1] in self._passed

    def num_calls_until(self, use: Use) -> int:
        """Return how many calls come until a use, that one counted."""
        # Calls don't come in quite the same order: what should have come by now comes any moment.
        return max(use[0] - len(self._passed) + 1, 1)

    def passes(self, use: Use, key: Key, position: int, *, unit_tokens: int) -> bool:
        """Return whether the checkpoint with a key lies on the way to where a call goes on, or there."""
        path, end = self._hit_of[use[1]]
        num_units = position // unit_tokens
        parent = path.hashes[num_units - 1] if num_units and position <= end else path.root
        if position > end or parent != key[0]:
            return False
        return tuple(path.token_ids[num_units * unit_tokens : position]) == key[1]


class ClairvoyantPolicy(SamplingPolicy):
    """What saves least goes first: seconds to rebuild it / bytes that only it holds / calls until its next use."""

    num_drawn = 128

    def __init__(self, future: Future) -> None:
        super().__init__()
        self._future = future
        self._uses: dict[Checkpoint | None, list[Use]] = {None: []}
        """Heaps of what is still to come, by the longest checkpoint that is there for it; None: nothing is."""

    def record(self, checkpoint: Checkpoint) -> None:
        super().record(checkpoint)
        key, tree = _key(checkpoint), self.facts.tree
        uses = set(self._future.uses_of(key))
        shorter = self._uses[tree.ancestor(checkpoint)]
        for use in shorter:
            if not self._future.has_passed(use) and self._future.passes(
                use, key, checkpoint.position, unit_tokens=tree.match_unit_tokens
            ):
                uses.add(use)
        shorter[:] = sorted(set(shorter) - uses)
        self._uses[checkpoint] = sorted(uses)

    def forget(self, checkpoint: Checkpoint) -> None:
        super().forget(checkpoint)
        shorter = self._uses[self.facts.tree.ancestor(checkpoint)]
        for use in self._uses.pop(checkpoint):
            heapq.heappush(shorter, use)

    def least(self, drawn: list[Checkpoint]) -> Checkpoint:
        return min(drawn, key=lambda checkpoint: (self._worth(checkpoint), checkpoint.last_event))

    def num_calls_until_use(self, checkpoint: Checkpoint) -> float:
        """Return how many calls come until a checkpoint is used, that one counted; infinity: it never is."""
        uses = self._uses[checkpoint]
        while uses and self._future.has_passed(uses[0]):
            heapq.heappop(uses)
        return self._future.num_calls_until(uses[0]) if uses else math.inf

    def _worth(self, checkpoint: Checkpoint) -> float:
        saved = self.facts.rebuild_seconds(checkpoint) / self.facts.own_bytes(checkpoint)
        return saved / self.num_calls_until_use(checkpoint)


def _key(checkpoint: Checkpoint) -> Key:
    return checkpoint.parent, checkpoint.tail
