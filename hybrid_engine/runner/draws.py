"""Random numbers that depend on a request's seed and a position alone, and what they pick.

No generator is kept: the draw for a position is the same whatever ran before, beside it or in which chunks.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np

_DIGEST_PERSON = b"hybrid-engine u"
"""Keeps these digests apart from every other use of the same hash."""


def uniform(seed: int, position: int) -> float:
    """Draw from [0, 1): the same number for the same seed and position, always.

    seed, position: from 0 to 2**64 - 1. Counter-based: the top 53 bits of BLAKE2b(seed, position) as a fraction.
    """
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8, person=_DIGEST_PERSON).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def pick(weights: np.ndarray, target: float) -> int:
    """Return the index at which the running sum of weights, float64, first exceeds target.

    A target that rounding carried past the end picks the last weight above 0.
    """
    index = int(np.searchsorted(np.cumsum(weights), target, side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])
