"""Checkpoints that were recorded: exact positions of a prefix at which every group can go on.

A recorded position is found under the hash of the last match unit at or below it (the salted root below the first)
together with the few tokens since. In each group that has a partly filled block there, the checkpoint keeps that
block; its slots below the position never change, while its owner may go on appending behind them. A recurrent state
is such a block too, one without end, but only a copy of it keeps its content. A reader copies before it writes.

Two ways to give memory back. Where no group has states, every block end is a position to go on from; blocks leave one
by one, least recently used first, and a recorded checkpoint goes with its block. Where states exist, only recorded
checkpoints can be resumed, so that they are the unit: each keeps all its blocks in all groups, the least recently used
one goes as a whole, and a block that none needs any more is empty at once.

Those laid for no other reason than that a prompt is long are thinned as its path grows: all but some near the path's
end are spare, see `is_spare`. A spare one is lost only when memory is short, but then before all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoint_facts import CheckpointFacts
from hybrid_engine.groups.checkpoint_tree import Path
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.pool import BlockPool

DENSE = 4
"""The newest checkpoints of a path that keep their spacing; before them it doubles whenever the distance does."""


def is_spare(position: int, newest: int, interval: int) -> bool:
    """Return whether a checkpoint is one too many on a path that has grown to newest; both are multiples of interval.

    The spacing d tokens before the newest is about d / 2: whoever parts from the path there computes at most so much
    again, and n intervals keep about 2 log2(n) checkpoints. One that is spare stays so as the path grows.
    """
    distance = (newest - position) // interval
    return position // interval % (1 << (distance // DENSE).bit_length()) != 0


class CheckpointKind(IntEnum):
    """What a checkpoint was laid for."""

    PROMPT_END = 0
    LAST_BLOCK = 1
    """The end of the prompt's last block: for the same prompt again."""
    MESSAGE_END = 2
    JUNCTION = 3
    """Others part there, or have parted."""
    PERIODIC = 4
    """The prompt is long."""
    ANSWER_END = 5


class Checkpoint:
    """One recorded position; equal only to itself."""

    __slots__ = (
        "blocks",
        "is_periodic",
        "is_spare",
        "keys",
        "kind",
        "last_event",
        "num_pins",
        "parent",
        "position",
        "tail",
    )

    def __init__(
        self,
        position: int,
        parent: BlockHash,
        tail: tuple[int, ...],
        blocks: tuple[Block | None, ...],
        keys: tuple[Sequence[BlockHash], ...] = (),
    ) -> None:
        """tail: the tokens since the parent.

        blocks: by group, the partly filled block or the state; None: position ends a block.
        keys: by group, those of the full blocks that are needed to go on there; only where checkpoints are the unit.
        """
        self.position = position
        self.parent = parent
        self.tail = tail
        self.blocks = blocks
        self.keys = keys
        self.kind = CheckpointKind.ANSWER_END
        self.num_pins = 0
        """Running requests that laid it: it stays while they run. `CheckpointIndex.pin` and `unpin` count them."""
        self.last_event = 0
        """When it was last recorded, used or thinned, in the order of such events."""
        self.is_spare = False
        """It is one too many on a long prompt, and was not used since it became so."""
        self.is_periodic = False
        """Laid only because the prompt is long, and not used yet: it may become spare."""

    def __repr__(self) -> str:
        return f"Checkpoint({self.position}, pinned {self.num_pins} times)"


def _keep_nothing(checkpoint: Checkpoint) -> None:
    """What is given up is lost."""


class CheckpointIndex:
    """The recorded checkpoints; one goes as soon as any group's block of it is taken."""

    def __init__(
        self, pools: Sequence[BlockPool], facts: CheckpointFacts, *, policy: EvictionPolicy | None = None
    ) -> None:
        """facts: of checkpoints, none yet. policy: checkpoints are kept as a whole, and it says which one goes; the
        arena then asks here for room."""
        self.facts = facts
        self._pools = pools
        self._is_unit = policy is not None
        self._policy = policy or EvictionPolicy()
        self._policy.bind(facts)
        self._by_parent: dict[BlockHash, dict[tuple[int, ...], Checkpoint]] = {}
        self.on_given_up: Callable[[Checkpoint], None] = _keep_nothing
        """Told of each checkpoint, spare ones excepted, that goes for lack of memory, its blocks' bytes still there."""
        self.num_recorded = 0
        """Checkpoints that were new when they were recorded."""
        self._num_events = 0
        for pool in pools:
            pool.on_checkpoint_lost = self._give_up
            if self._is_unit:
                pool.needed = {}
                pool.arena.give_up_one = self.give_up_one

    def __iter__(self) -> Iterator[Checkpoint]:
        for siblings in self._by_parent.values():
            yield from siblings.values()

    def worth_keeping(self) -> Iterator[Checkpoint]:
        """Iterate over all but the spare ones, the least recently used first."""
        kept = (checkpoint for checkpoint in self if not checkpoint.is_spare)
        return iter(sorted(kept, key=lambda checkpoint: checkpoint.last_event))

    def record(self, checkpoint: Checkpoint, path: Path) -> Checkpoint:
        """Keep a checkpoint whose blocks are written and held; return it, or the one of the same prefix that stays.

        path: of the request that laid it.
        """
        older = self._by_parent.get(checkpoint.parent, {}).get(checkpoint.tail)
        if older is not None:
            if self._is_unit or older.blocks == checkpoint.blocks:
                self.touch(older)
                return older
            self.forget(older)
        self._by_parent.setdefault(checkpoint.parent, {})[checkpoint.tail] = checkpoint
        self._note_event(checkpoint)
        self.num_recorded += 1
        for block in checkpoint.blocks:
            if block is not None:
                block.checkpoints.append(checkpoint)
        for pool, keys in zip(self._pools, checkpoint.keys, strict=False):
            pool.need(keys)
        if self._is_unit:
            self.facts.tree.add(checkpoint, path)
        self._policy.record(checkpoint)
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was used; those on the way to it stay as old as they are."""
        checkpoint.is_periodic = False
        checkpoint.is_spare = False
        self._note_event(checkpoint)
        self._policy.use(checkpoint)

    def thin(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint go before all others when memory is short, unless it is used until then."""
        checkpoint.is_spare = True
        checkpoint.is_periodic = False
        self._note_event(checkpoint)
        self._policy.thin(checkpoint)

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint until it is unpinned as often as it was pinned."""
        checkpoint.num_pins += 1
        if checkpoint.num_pins == 1:
            self._policy.pin(checkpoint)

    def unpin(self, checkpoint: Checkpoint) -> None:
        """Undo one `pin`."""
        assert checkpoint.num_pins > 0, f"{checkpoint} is not pinned"
        checkpoint.num_pins -= 1
        if checkpoint.num_pins == 0 and self.is_recorded(checkpoint):
            self._policy.unpin(checkpoint)

    def is_recorded(self, checkpoint: Checkpoint) -> bool:
        """Return whether a checkpoint has not been forgotten."""
        return self.get(checkpoint.parent, checkpoint.tail) is checkpoint

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint; a block that only it made useful is empty from now on."""
        siblings = self._by_parent[checkpoint.parent]
        del siblings[checkpoint.tail]
        if not siblings:
            del self._by_parent[checkpoint.parent]
        for pool, block in zip(self._pools, checkpoint.blocks, strict=True):
            if block is not None:
                block.checkpoints.remove(checkpoint)
                pool.settle(block)
        for pool, keys in zip(self._pools, checkpoint.keys, strict=False):
            pool.release_need(keys)
        self._policy.forget(checkpoint)
        if self._is_unit:
            self.facts.tree.remove(checkpoint)

    def forget_all(self) -> None:
        """Drop all checkpoints."""
        for checkpoint in list(self):
            self.forget(checkpoint)

    def get(self, parent: BlockHash, tail: tuple[int, ...]) -> Checkpoint | None:
        """Return the checkpoint with exactly this tail, or None."""
        return self._by_parent.get(parent, {}).get(tail)

    def has(self, parent: BlockHash) -> bool:
        """Return whether any checkpoint lies right behind this hash."""
        return parent in self._by_parent

    def find(self, parent: BlockHash, tokens: Sequence[int]) -> Iterator[Checkpoint]:
        """Iterate over the checkpoints behind parent whose tail starts tokens, the longest first."""
        siblings = self._by_parent.get(parent)
        if siblings is None:
            return
        for length in range(len(tokens), -1, -1):
            checkpoint = siblings.get(tuple(tokens[:length]))
            if checkpoint is not None:
                yield checkpoint

    def give_up_one(self) -> bool:
        """Give up the checkpoint that is worth least over all groups; return False when all are pinned, or none is."""
        if not self._is_unit:
            return False
        victim = self._policy.next_victim()
        if victim is None:
            return False
        assert victim.num_pins == 0, f"{victim} was to go"
        if victim.is_spare:
            self.forget(victim)
        else:
            self._give_up(victim)
        return True

    def _give_up(self, checkpoint: Checkpoint) -> None:
        self.on_given_up(checkpoint)
        self.forget(checkpoint)

    def _note_event(self, checkpoint: Checkpoint) -> None:
        self._num_events += 1
        checkpoint.last_event = self._num_events
