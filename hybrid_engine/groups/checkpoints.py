"""Checkpoints that were recorded: exact positions of a prefix at which every group can go on.

A recorded position is found under the hash of the last match unit at or below it (the salted root below the first)
together with the few tokens since. In each group that has a partly filled block there, the checkpoint keeps that
block; its slots below the position never change, while its owner may go on appending behind them. A recurrent state
is such a block too, one without end, but only a copy of it keeps its content. A reader copies before it writes.

Two ways to give memory back. Where no group has states, every block end is a position to go on from; blocks leave one
by one, least recently used first, and a recorded checkpoint goes with its block. Where states exist, only recorded
checkpoints can be resumed, so that they are the unit: each keeps all its blocks in all groups, the least recently used
one goes as a whole, and a block that none needs any more is empty at once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.pool import BlockPool


class Checkpoint:
    """One recorded position; equal only to itself."""

    __slots__ = ("blocks", "keys", "num_pins", "parent", "position", "tail")

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

    def __repr__(self) -> str:
        return f"Checkpoint({self.position}, pinned {self.num_pins} times)"


class CheckpointIndex:
    """The recorded checkpoints; one goes as soon as any group's block of it is taken."""

    def __init__(self, pools: Sequence[BlockPool], *, is_unit: bool = False) -> None:
        """is_unit: checkpoints are kept and given up as a whole; the pools then ask here for room."""
        self._pools = pools
        self._is_unit = is_unit
        self._by_parent: dict[BlockHash, dict[tuple[int, ...], Checkpoint]] = {}
        self._by_recency: OrderedDict[Checkpoint, None] = OrderedDict()
        self.num_recorded = 0
        """Checkpoints that were new when they were recorded."""
        for pool in pools:
            pool.on_checkpoint_lost = self.forget
            if is_unit:
                pool.needed = {}
                pool.make_empty = self._give_up_for

    def __iter__(self) -> Iterator[Checkpoint]:
        for siblings in self._by_parent.values():
            yield from siblings.values()

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
        self._by_recency.move_to_end(checkpoint)

    def forget(self, checkpoint: Checkpoint) -> None:
        """Drop a checkpoint; a block that only it made useful is empty from now on."""
        siblings = self._by_parent[checkpoint.parent]
        del siblings[checkpoint.tail]
        if not siblings:
            del self._by_parent[checkpoint.parent]
        del self._by_recency[checkpoint]
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

    def _give_up_for(self, pool: BlockPool, num_blocks: int) -> None:
        """Give up checkpoints, the least recently used first, until a pool has so many empty blocks."""
        if pool.free.num_empty >= num_blocks:
            return
        for checkpoint in list(self._by_recency):
            if checkpoint.num_pins == 0:
                self.forget(checkpoint)
                if pool.free.num_empty >= num_blocks:
                    return
        raise AssertionError(f"{pool.num_free} blocks are free, {pool.free.num_empty} of {num_blocks} could be emptied")
