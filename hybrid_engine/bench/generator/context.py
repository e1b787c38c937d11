"""What a model is shown, as it grows: kept as tokens, or as identities of blocks where prompts are long.

New content is always content that was never there before; contexts share what they had in common when one was forked
from the other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

from hybrid_engine.bench.workload import BlockPrompt, Prompt, TokenPrompt


class Context(ABC):
    """Messages one after the other, of which only sizes and identity count."""

    def __init__(self, ends: Sequence[int] = ()) -> None:
        self._ends = list(ends)
        """Tokens after which each message ends."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all messages."""
        return self._ends[-1] if self._ends else 0

    @property
    def message_boundaries(self) -> tuple[int, ...]:
        """Tokens after which each message ends, ascending."""
        return tuple(self._ends)

    def append(self, num_tokens: int) -> None:
        """Add a message that was never seen before."""
        assert num_tokens > 0, num_tokens
        start = self.num_tokens
        self._ends.append(start + num_tokens)
        self._grow(start, start + num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Drop what is behind the first num_tokens, which end a message or become the end of one."""
        assert 0 < num_tokens <= self.num_tokens, (num_tokens, self.num_tokens)
        self._ends = [*self._ends[: bisect_left(self._ends, num_tokens)], num_tokens]
        self._shrink(num_tokens)

    def rewrite(self, start: int) -> None:
        """Put other content in place of all behind the first `start` tokens; messages keep their sizes."""
        assert 0 <= start <= self.num_tokens, (start, self.num_tokens)
        self._shrink(start)
        self._grow(start, self.num_tokens)

    @abstractmethod
    def fork(self) -> Context:
        """Return a context that begins like this one and goes its own way."""

    @abstractmethod
    def prompt(self) -> Prompt:
        """Return all of it."""

    @abstractmethod
    def answer(self, num_reasoning: int, num_shown: int) -> Sequence[int] | None:
        """Add the part of an answer that later prompts show, as a message; return all of it, or None of blocks."""

    @abstractmethod
    def _grow(self, start: int, end: int) -> None:
        """Put new content behind the first `start` tokens, which are all there are, up to `end`."""

    @abstractmethod
    def _shrink(self, end: int) -> None:
        """Forget the content behind the first `end` tokens."""


class TokenSource:
    """Makes token ids that look like no others."""

    def __init__(self, seed: int, vocabulary_size: int) -> None:
        self._draw = np.random.default_rng(seed)
        self._vocabulary_size = vocabulary_size

    def take(self, num_tokens: int) -> array[int]:
        """Return new tokens; two draws of some tokens begin differently as good as always."""
        tokens = self._draw.integers(1, self._vocabulary_size, num_tokens, dtype=np.int64)
        return array("q", tokens.tobytes())


class TokenContext(Context):
    """A context kept as tokens; forks share the pieces."""

    def __init__(self, source: TokenSource, *, pieces: Sequence[array[int]] = (), ends: Sequence[int] = ()) -> None:
        super().__init__(ends)
        self._source = source
        self._pieces = list(pieces)

    def fork(self) -> TokenContext:
        return TokenContext(self._source, pieces=self._pieces, ends=self._ends)

    def prompt(self) -> TokenPrompt:
        return TokenPrompt(tuple(self._pieces))

    def answer(self, num_reasoning: int, num_shown: int) -> array[int]:
        reasoning = self._source.take(num_reasoning)
        self.append(num_shown)
        return reasoning + self._pieces[-1]

    def _grow(self, start: int, end: int) -> None:
        self._pieces.append(self._source.take(end - start))

    def _shrink(self, end: int) -> None:
        kept = []
        for piece in self._pieces:
            if end > 0:
                kept.append(piece[:end] if end < len(piece) else piece)
            end -= len(piece)
        self._pieces = kept


class BlockSource:
    """Numbers blocks that were never there before, in ascending order."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._next_id = 0

    def take(self, num_blocks: int) -> tuple[int, int]:
        """Return a run: its first id, and how many there are."""
        first, self._next_id = self._next_id, self._next_id + num_blocks
        return first, num_blocks


class BlockContext(Context):
    """A context kept as the ids of its full blocks.

    A block gets its id when it is full. What of a fork lies in a block that was not full when they parted is therefore
    in none that they share, as it must be.
    """

    def __init__(self, source: BlockSource, *, runs: Sequence[tuple[int, int]] = (), ends: Sequence[int] = ()) -> None:
        super().__init__(ends)
        self._source = source
        self._runs = list(runs)
        self._num_blocks = sum(count for _, count in self._runs)

    def fork(self) -> BlockContext:
        return BlockContext(self._source, runs=self._runs, ends=self._ends)

    def prompt(self) -> BlockPrompt:
        return BlockPrompt(self.num_tokens, tuple(self._runs), self._source.block_tokens)

    def answer(self, num_reasoning: int, num_shown: int) -> None:
        self.append(num_shown)

    def _grow(self, start: int, end: int) -> None:
        num_new = end // self._source.block_tokens - self._num_blocks
        if not num_new:
            return
        first, _ = self._source.take(num_new)
        self._num_blocks += num_new
        if self._runs and sum(self._runs[-1]) == first:
            num_new += self._runs[-1][1]
            first = self._runs.pop()[0]
        self._runs.append((first, num_new))

    def _shrink(self, end: int) -> None:
        self._num_blocks = end // self._source.block_tokens
        left, kept = self._num_blocks, []
        for first, count in self._runs:
            if left > 0:
                kept.append((first, min(count, left)))
            left -= count
        self._runs = kept
