"""Chain hashes: the name under which the bytes of a prefix are found again."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b
from typing import NewType

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that stand for a whole prefix, its tenant and its adapter."""

DIGEST_BYTES = 16
_TOKEN_BYTES = 8


class BlockHasher:
    """Hashes the prefixes that end at multiples of the match unit.

    Each hash covers its parent's hash and the tokens since. The chain's root is a keyed BLAKE2b (RFC 7693) of the
    tenant's salt and the adapter; whoever doesn't know the key can't know any parent, and so can't craft a collision.
    """

    def __init__(self, match_unit_tokens: int, *, key: bytes | None = None) -> None:
        """key: up to 64 bytes; None draws one for this process."""
        self.match_unit_tokens = match_unit_tokens
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, *, cache_salt: str = "", adapter: str = "") -> BlockHash:
        """Return the parent of a prefix's first block; different salts or adapters never meet."""
        digest = blake2b(key=self._key, digest_size=DIGEST_BYTES, person=b"hybrid-engine")
        for kind, value in ((b"salt", cache_salt), (b"adapter", adapter)):
            encoded = value.encode()
            # Typed and length-prefixed: adapter "x" must not equal salt "x", nor "a" + "bc" equal "ab" + "c".
            digest.update(kind + len(encoded).to_bytes(8, "little") + encoded)
        return BlockHash(digest.digest())

    def extend(self, hashes: list[BlockHash], root: BlockHash, token_ids: Sequence[int]) -> None:
        """Append to hashes those of all complete units of token_ids that it doesn't have yet."""
        unit = self.match_unit_tokens
        first, end = len(hashes), len(token_ids) // unit
        if first >= end:
            return
        data = array("q", token_ids[first * unit : end * unit]).tobytes()
        unit_bytes = unit * _TOKEN_BYTES
        parent = hashes[-1] if hashes else root
        for offset in range(0, len(data), unit_bytes):
            parent = BlockHash(blake2b(parent + data[offset : offset + unit_bytes], digest_size=DIGEST_BYTES).digest())
            hashes.append(parent)
