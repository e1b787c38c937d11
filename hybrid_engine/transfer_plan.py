"""What a plan says of bytes that leave the cache or come back: names of stored things, and the blocks they go with.

Two kinds of things are stored. A full block, under the hash of the prefix that it ends. And a recorded checkpoint's
own part: its partly filled blocks and its states, together, under the hash below it and the tokens since. Both names
say what the bytes were computed from, so that they mean the same in every process that hashes with the same key.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple, NewType

LoadId = NewType("LoadId", int)
"""Names one load for as long as its connector lives."""


class BlockKey(NamedTuple):
    """A full block of one group."""

    group_id: int
    block_hash: bytes

    @property
    def name(self) -> str:
        """The key as text, the same in every process."""
        return f"{self.group_id}.{self.block_hash.hex()}"


class CheckpointKey(NamedTuple):
    """The partly filled blocks and states of one recorded checkpoint."""

    parent: bytes
    """Hash of the last match unit at or below the position; the salted root below the first."""
    tail: tuple[int, ...]
    """The tokens since."""
    position: int

    @property
    def name(self) -> str:
        """The key as text, the same in every process."""
        digest = blake2b(self.parent, digest_size=16, person=b"checkpoint")
        for number in (self.position, *self.tail):
            digest.update(number.to_bytes(8, "little"))
        return f"checkpoint.{digest.hexdigest()}"


StoreKey = BlockKey | CheckpointKey


class BlockPart(NamedTuple):
    """Slots [0, num_slots) of a block, or one state (num_slots 1)."""

    group_id: int
    block_id: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One stored thing and the block, or for a checkpoint the blocks, that its bytes lie in or belong in."""

    key: StoreKey
    parts: tuple[BlockPart, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Stored things that are to be written into blocks which nobody touches meanwhile: all of them, or it failed."""

    load_id: LoadId
    transfers: tuple[Transfer, ...]
