"""Guesses by looking up: what stood behind the last few tokens when they stood there before, will stand there again.

Pays where answers copy: quotes, code that is edited, extraction. Source: Saxena, "Prompt Lookup Decoding", 2023. The
prompt isn't searched in each step: every request has an index that grows by its new tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from hybrid_engine.request import Request


class NgramDrafter:
    """Drafts what followed the longest n-gram at a request's end, where it last stood before."""

    def __init__(self, *, min_tokens: int, max_tokens: int) -> None:
        """min_tokens, max_tokens: lengths of the n-grams that are looked for, the longest first."""
        assert 1 <= min_tokens <= max_tokens, f"n-grams of {min_tokens} .. {max_tokens} tokens"
        self._lengths = range(max_tokens, min_tokens - 1, -1)
        # An index goes when nobody has its request any more.
        self._indexes: WeakKeyDictionary[Request, NgramIndex] = WeakKeyDictionary()

    def propose(self, requests: Sequence[Request], num_drafts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each request at most so many drafts; none where its last tokens never stood before."""
        return [
            self._propose(request, count) if count else () for request, count in zip(requests, num_drafts, strict=True)
        ]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take note of how a draft fared: of no use here."""

    def _propose(self, request: Request, num_drafts: int) -> tuple[int, ...]:
        index = self._indexes.get(request)
        if index is None:
            index = self._indexes[request] = NgramIndex(self._lengths)
        index.extend(request.token_ids)
        start = index.find_continuation(request.token_ids)
        return () if start is None else _copy(request.token_ids, start, num_drafts)


class NgramIndex:
    """Where each n-gram of a growing list of tokens last ended, the list's last token not counted."""

    def __init__(self, lengths: Sequence[int]) -> None:
        """lengths: the n, in the order in which they are tried."""
        self._ends: dict[int, dict[tuple[int, ...], int]] = {length: {} for length in lengths}
        self._num_indexed = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in the tokens that came since the last call: a fixed number of operations for each."""
        last_end = len(token_ids) - 1
        for length, ends in self._ends.items():
            first_end = max(length, self._num_indexed + 1)
            if first_end <= last_end:
                columns = [token_ids[first_end - length + i : last_end - length + i + 1] for i in range(length)]
                # Of equal n-grams the later one stays.
                ends.update(zip(zip(*columns, strict=True), range(first_end, last_end + 1), strict=True))
        self._num_indexed = max(self._num_indexed, last_end)

    def find_continuation(self, token_ids: Sequence[int]) -> int | None:
        """Return where the tokens go on that last stood behind the longest n-gram at the list's end."""
        for length, ends in self._ends.items():
            end = ends.get(tuple(token_ids[-length:]))
            if end is not None:
                return end
        return None


def _copy(token_ids: Sequence[int], start: int, num_tokens: int) -> tuple[int, ...]:
    """Return num_tokens tokens from start on; near the end they repeat themselves, as 'abab' goes on with 'ab'."""
    found = list(token_ids[start : start + num_tokens])
    period = len(token_ids) - start
    while len(found) < num_tokens:
        found.append(found[len(found) - period])
    return tuple(found)
