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

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import chain

from hybrid_engine.groups.block import Block
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


class Checkpoint:
    """One recorded position; equal only to itself."""

    __slots__ = ("blocks", "is_periodic", "keys", "num_pins", "parent", "position", "tail")

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
        self.num_pins = 0
        """Running requests that laid it: it stays while they run."""
        self.is_periodic = False
        """Laid only because the prompt is long, and not used yet: it may become spare."""

    def __repr__(self) -> str:
        return f"Checkpoint({self.position}, pinned {self.num_pins} times)"


def _keep_nothing(checkpoint: Checkpoint) -> None:
    """What is given up is lost."""


class CheckpointIndex:
    """The recorded checkpoints; one goes as soon as any group's block of it is taken."""

    def __init__(self, pools: Sequence[BlockPool], *, is_unit: bool = False) -> None:
        """is_unit: checkpoints are kept and given up as a whole; the pools then ask here for room."""
        self._pools = pools
        self._is_unit = is_unit
        self._by_parent: dict[BlockHash, dict[tuple[int, ...], Checkpoint]] = {}
        self._by_recency: OrderedDict[Checkpoint, None] = OrderedDict()
        self.on_given_up: Callable[[Checkpoint], None] = _keep_nothing
        """Told of each checkpoint, spare ones excepted, that goes for lack of memory, its blocks' bytes still there."""
        self._spare: OrderedDict[Checkpoint, None] = OrderedDict()
        self.num_recorded = 0
        """Checkpoints that were new when they were recorded."""
        for pool in pools:
            pool.on_checkpoint_lost = self._give_up
            if is_unit:
                pool.needed = {}
                pool.arena.give_up_one = self.give_up_one

    def __iter__(self) -> Iterator[Checkpoint]:
        for siblings in self._by_parent.values():
            yield from siblings.values()

    def worth_keeping(self) -> Iterator[Checkpoint]:
        """Iterate over all but the spare ones, the least recently used first."""
        return iter(self._by_recency)

    def record(self, checkpoint: Checkpoint) -> Checkpoint:
        """Keep a checkpoint whose blocks are written and held; return it, or the one of the same prefix that stays."""
        older = self._by_parent.get(checkpoint.parent, {}).get(checkpoint.tail)
        if older is not None:
            if self._is_unit or older.blocks == checkpoint.blocks:
                self.touch(older)
                return older
            self.forget(older)
        self._by_parent.setdefault(checkpoint.parent, {})[checkpoint.tail] = checkpoint
        self._by_recency[checkpoint] = None
        self.num_recorded += 1
        for block in checkpoint.blocks:
            if block is not None:
                block.checkpoints.append(checkpoint)
        for pool, keys in zip(self._pools, checkpoint.keys, strict=False):
            pool.need(keys)
        return checkpoint

    def touch(self, checkpoint: Checkpoint) -> None:
        """Note that a checkpoint was used; those on the way to it stay as old as they are."""
        checkpoint.is_periodic = False
        self._spare.pop(checkpoint, None)
        self._by_recency[checkpoint] = None
        self._by_recency.move_to_end(checkpoint)

    def thin(self, checkpoint: Checkpoint) -> None:
        """Let a checkpoint go before all others when memory is short, unless it is used until then."""
        del self._by_recency[checkpoint]
        self._spare[checkpoint] = None
        checkpoint.is_periodic = False

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint; a block that only it made useful is empty from now on."""
        siblings = self._by_parent[checkpoint.parent]
        del siblings[checkpoint.tail]
        if not siblings:
            del self._by_parent[checkpoint.parent]
        (self._spare if checkpoint in self._spare else self._by_recency).pop(checkpoint)
        for pool, block in zip(self._pools, checkpoint.blocks, strict=True):
            if block is not None:
                block.checkpoints.remove(checkpoint)
                pool.settle(block)
        for pool, keys in zip(self._pools, checkpoint.keys, strict=False):
            pool.release_need(keys)

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

    def _give_up(self, checkpoint: Checkpoint) -> None:
        self.on_given_up(checkpoint)
        self.forget(checkpoint)

    def give_up_one(self) -> bool:
        """Give up a spare checkpoint, else the least recently used; return False when all are pinned."""
        order = chain(self._spare, self._by_recency)
        victim = next((checkpoint for checkpoint in order if checkpoint.num_pins == 0), None)
        if victim is None:
            return False
        if victim in self._spare:
            self.forget(victim)
        else:
            self._give_up(victim)
        return True
