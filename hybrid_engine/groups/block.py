"""One block of a group, as the bookkeeping sees it."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.step_plan import BlockId

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoints import Checkpoint
    from hybrid_engine.groups.extent import Extent


class Block:
    """A block's owner count, its key if it can be found, its place in memory, and its place among the free ones.

    Its id, and the extent that it lies in, change when it is moved out of the way; whoever holds it need not know.

    | ref_count | block_hash | queue | state                                            |
    |-----------|------------|-------|--------------------------------------------------|
    | > 0       | None       | None  | held by requests, being filled                   |
    | > 0       | set        | None  | held by requests, full: nobody writes it again   |
    | 0         | set        | set   | cached: found by its key until it is taken       |
    | 0         | None       | set   | cached: only checkpoints inside it make it known |
    | 0         | None       | None  | empty: its bytes mean nothing                    |
    """

    __slots__ = ("block_hash", "block_id", "checkpoints", "extent", "queue", "ref_count", "released_at")

    def __init__(self, block_id: BlockId, extent: Extent | None = None) -> None:
        """extent: where it lies; None for the null block, which lies in none."""
        self.block_id = block_id
        self.extent = extent
        self.ref_count = 0
        self.block_hash: BlockHash | None = None
        self.queue: OrderedDict[Block, None] | None = None
        self.checkpoints: list[Checkpoint] = []
        self.released_at = 0
        """When it came into its queue, on the arena's count of such events."""

    @property
    def is_known(self) -> bool:
        """Whether anybody could find the block's bytes."""
        return self.block_hash is not None or bool(self.checkpoints)

    def __repr__(self) -> str:
        key = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_count={self.ref_count}, block_hash={key})"
