"""Checkpoints inside a block: positions that a prompt or an answer really ended at.

A prefix that ends inside a block is found under the hash of the last match unit below it (the salted root below the
first) together with the few tokens since. In each group that has a partly filled block there, the checkpoint keeps
that block; its slots below the checkpoint never change, while its owner may go on appending behind them. A reader
copies the block before it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hybrid_engine.groups.block import Block
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.pool import BlockPool


class Checkpoint:
    """One recorded position; equal only to itself."""

    __slots__ = ("blocks", "parent", "position", "tail")

    def __init__(
        self, position: int, parent: BlockHash, tail: tuple[int, ...], blocks: tuple[Block | None, ...]
    ) -> None:
        """tail: the tokens since the parent. blocks: by group, the partly filled block; None: position ends a block."""
        self.position = position
        self.parent = parent
        self.tail = tail
        self.blocks = blocks


class CheckpointIndex:
    """The checkpoints inside blocks; one goes as soon as any group's block of it is taken."""

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        self._pools = pools
        self._by_parent: dict[BlockHash, dict[tuple[int, ...], Checkpoint]] = {}

    def __iter__(self) -> Iterator[Checkpoint]:
        for siblings in self._by_parent.values():
            yield from siblings.values()

    def record(self, checkpoint: Checkpoint) -> None:
        """Keep a checkpoint whose blocks are written and held; one of the same prefix is replaced."""
        older = self._by_parent.get(checkpoint.parent, {}).get(checkpoint.tail)
        if older is not None:
            if older.blocks == checkpoint.blocks:
                return
            self.forget(older)
        self._by_parent.setdefault(checkpoint.parent, {})[checkpoint.tail] = checkpoint
        for block in checkpoint.blocks:
            if block is not None:
                block.checkpoints.append(checkpoint)

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

    def forget_all(self) -> None:
        """Drop all checkpoints."""
        for checkpoint in list(self):
            self.forget(checkpoint)

    def has_any(self, parents: Sequence[BlockHash]) -> bool:
        """Return whether any of these hashes has a checkpoint right behind it."""
        return not self._by_parent.keys().isdisjoint(parents)

    def find(self, parent: BlockHash, tokens: Sequence[int]) -> Iterator[Checkpoint]:
        """Iterate over the checkpoints behind parent whose tail starts tokens, the longest first."""
        siblings = self._by_parent.get(parent)
        if siblings is None:
            return
        for length in range(len(tokens), -1, -1):
            checkpoint = siblings.get(tuple(tokens[:length]))
            if checkpoint is not None:
                yield checkpoint
