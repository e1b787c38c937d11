"""How far a prompt is known when everything counts that is stored, beside what the device still has.

The rule is the one of every other hit: the groups' managers and the prefix lookup run here too, over pools that show
the device's blocks and the stored ones as one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoints import Checkpoint, CheckpointIndex
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.groups.managers import make_manager
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.prefix_lookup import PrefixLookup
from hybrid_engine.request import Request
from hybrid_engine.transfer_plan import BlockKey, CheckpointKey, StoreKey

Source = Block | BlockKey
"""Where the bytes of a full block come from: the device, or the store."""


class Stored:
    """What the lookup asks of a store, and of what is on its way there."""

    def has(self, key: StoreKey) -> bool:
        """Return whether a thing can be had."""
        raise NotImplementedError

    def checkpoints_behind(self, parent: bytes) -> Mapping[tuple[int, ...], CheckpointKey]:
        """Return the checkpoints right behind a hash, by the tokens since."""
        raise NotImplementedError


class ExternalHit(NamedTuple):
    """A position to go on from, and where each thing that it needs lies."""

    num_tokens: int
    tables: tuple[Sequence[Source], ...]
    """By group, the full blocks below the position; null blocks where the group needs nothing."""
    checkpoint: Checkpoint | CheckpointKey | None
    """Where the partly filled blocks and the states lie, if any are needed."""

    def stored_keys(self, first_blocks: Sequence[int]) -> list[StoreKey]:
        """Return all that must come from the store; the blocks below first_blocks, by group, are there already."""
        keys: list[StoreKey] = [
            source
            for table, first in zip(self.tables, first_blocks, strict=True)
            for source in table[first:]
            if isinstance(source, BlockKey)
        ]
        return [*keys, self.checkpoint] if isinstance(self.checkpoint, CheckpointKey) else keys


class ExternalLookup:
    """Finds the longest hit over the device and the store together; changes nothing."""

    def __init__(self, coordinator: Coordinator, stored: Stored) -> None:
        unit = coordinator.match_unit_tokens
        managers = [
            make_manager(
                group.spec,
                cast(BlockPool, _UnitedPool(group.group_id, manager.pool, stored)),
                match_unit_tokens=unit,
            )
            for group, manager in zip(coordinator.groups, coordinator.managers, strict=True)
        ]
        self._lookup = PrefixLookup(
            managers,
            cast(CheckpointIndex, _UnitedCheckpoints(coordinator.checkpoints, stored)),
            match_unit_tokens=unit,
            alignment_tokens=coordinator.alignment_tokens,
        )

    def find(self, request: Request, *, max_tokens: int | None = None) -> ExternalHit:
        """Return the longest hit of at most max_tokens; None: of all known tokens but the last."""
        hit, tables = self._lookup.collect_hit(request, max_tokens=max_tokens)
        return ExternalHit(hit.num_computed_tokens, cast(tuple[Sequence[Source], ...], tables), hit.checkpoint)


class _UnitedPool:
    """As much of a pool as a manager reads."""

    def __init__(self, group_id: int, pool: BlockPool, stored: Stored) -> None:
        self.null_block = pool.null_block
        self.cached = _UnitedBlocks(group_id, pool, stored)
        self.evicted: dict[BlockHash, None] = {}


class _UnitedBlocks:
    """Full blocks by their hash: the device's own first."""

    def __init__(self, group_id: int, pool: BlockPool, stored: Stored) -> None:
        self._group_id = group_id
        self._pool = pool
        self._stored = stored

    def get(self, block_hash: BlockHash) -> Source | None:
        block = self._pool.cached.get(block_hash)
        if block is not None:
            return block
        key = BlockKey(self._group_id, block_hash)
        return key if self._stored.has(key) else None

    def __contains__(self, block_hash: BlockHash) -> bool:
        return self.get(block_hash) is not None


class _UnitedCheckpoints:
    """As much of the recorded checkpoints as the prefix lookup reads."""

    def __init__(self, recorded: CheckpointIndex, stored: Stored) -> None:
        self._recorded = recorded
        self._stored = stored

    def has(self, parent: BlockHash) -> bool:
        return self._recorded.has(parent) or bool(self._stored.checkpoints_behind(parent))

    def find(self, parent: BlockHash, tokens: Sequence[int]) -> Iterator[Any]:
        stored = self._stored.checkpoints_behind(parent)
        for length in range(len(tokens), -1, -1):
            tail = tuple(tokens[:length])
            found = self._recorded.get(parent, tail) or stored.get(tail)
            if found is not None:
                yield found
