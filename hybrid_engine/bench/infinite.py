"""What a cache of unlimited memory would hit, exact to the token, for tokens as for blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_engine.bench.prefix_tree import PrefixTree
from hybrid_engine.bench.token_free import NamedTokens


class InfiniteCache:
    """Remembers every prompt and answer; no real cache hits more of a prompt than `add` says was known."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._blocks = _NamedBlocks()

    @property
    def num_tokens(self) -> int:
        """Tokens remembered, shared beginnings counted once."""
        return self._tree.num_tokens + self._blocks.num_tokens

    def add(self, tokens: list[int] | NamedTokens, length: int | None = None) -> int:
        """Remember the first length tokens, all by default; return how many of the first were known before."""
        length = len(tokens) if length is None else length
        if isinstance(tokens, NamedTokens):
            return self._blocks.add(tokens.names, length, tokens.block_tokens)
        return self._tree.add(np.array(tokens[:length], np.int64))


class _NamedBlocks:
    """Prefixes as names of blocks; of each block how many tokens are known."""

    def __init__(self) -> None:
        self._num_known: dict[int, int] = {}
        self.num_tokens = 0

    def add(self, names: Sequence[int], length: int, size: int) -> int:
        num_full, tail = divmod(length, size)
        # A name stands for all before it as well, so that known ones come first.
        low, high = 0, num_full
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._num_known.get(names[middle]) == size else (low, middle)
        known = low * size
        end = size if low < num_full else tail
        if end:
            known += min(self._num_known.get(names[low], 0), end)
        if known < length:
            self.num_tokens += length - known
            self._num_known.update(dict.fromkeys(names[low:num_full], size))
            if tail:
                self._num_known[names[num_full]] = max(self._num_known.get(names[num_full], 0), tail)
        return known
