"""Which cached prefixes are of most use, told apart without a word of them."""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_PREFIXES = 4096
"""So many are remembered; the ones that were not hit for longest are forgotten first."""


@dataclass(slots=True)
class _Use:
    salt: str
    num_tokens: int
    num_hits: int = 0
    last_hit: float = 0.0


class PrefixUse:
    """Counts how often each prefix was hit."""

    def __init__(self, max_prefixes: int = MAX_PREFIXES) -> None:
        self._max_prefixes = max_prefixes
        # Nobody can try out what a prefix's name stands for.
        self._key = secrets.token_bytes(16)
        self._uses: OrderedDict[str, _Use] = OrderedDict()

    def note(self, salt: str, token_ids: Sequence[int], num_cached_tokens: int) -> None:
        """Count a prompt whose first tokens were found in the cache. Equal ones of different salts are different."""
        if num_cached_tokens == 0:
            return
        digest = hashlib.blake2b(
            np.asarray(token_ids[:num_cached_tokens], np.int32).tobytes(), digest_size=8, key=self._key
        )
        digest.update(salt.encode())
        name = digest.hexdigest()
        use = self._uses.setdefault(name, _Use(salt, num_cached_tokens))
        use.num_hits += 1
        use.last_hit = time.monotonic()
        self._uses.move_to_end(name)
        if len(self._uses) > self._max_prefixes:
            self._uses.popitem(last=False)

    def clear(self) -> None:
        """Forget all: the prefixes are cached no longer."""
        self._uses.clear()

    def top(self, count: int, *, may_see: Callable[[str], bool]) -> list[dict[str, Any]]:
        """Return the prefixes that have saved most tokens, best first, of the salts that may be seen."""
        seen = [(name, use) for name, use in self._uses.items() if may_see(use.salt)]
        best = sorted(seen, key=lambda item: item[1].num_tokens * item[1].num_hits, reverse=True)
        now = time.monotonic()
        return [
            {
                "id": name,
                "num_tokens": use.num_tokens,
                "num_hits": use.num_hits,
                "saved_tokens": use.num_tokens * use.num_hits,
                "seconds_since_hit": round(now - use.last_hit, 3),
            }
            for name, use in best[:count]
        ]
