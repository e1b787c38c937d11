"""Requests whose tokens are not known, only which blocks of their prompts are equal: nothing is expanded.

A block's name stands for the whole prefix that ends with it, so that names are the block hashes. A token is named by
its block and its place there, and made only where a few are asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any, cast

from hybrid_engine.bench.block_formats import as_runs
from hybrid_engine.bench.workload import BlockPrompt
from hybrid_engine.groups.hashing import BlockHash, BlockHasher
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.request import Request

_SCOPE_BITS = 40
"""Room for the ids of one scope."""
ROOT = BlockHash(b"")


class NamedTokens:
    """The tokens of a prompt and its answer, so far; like a list of token ids where the bookkeeping asks."""

    __slots__ = ("_length", "block_tokens", "names")

    def __init__(self, names: Sequence[int], length: int, block_tokens: int) -> None:
        """names: of all blocks that the prompt and its answer touch. length: the prompt's."""
        self.names = names
        self.block_tokens = block_tokens
        self._length = length

    def __len__(self) -> int:
        return self._length

    def append(self, token_id: int) -> None:
        """Let the answer grow by the token that the names say, whatever it is called."""
        self._length += 1

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self._stretch(range(self._length)[index], 1)[0]
        start, stop, step = index.indices(self._length)
        tokens: list[int] = []
        while len(tokens) < stop - start:
            tokens += self._stretch(start + len(tokens), stop - start - len(tokens))
        return tokens[::step]

    def _stretch(self, start: int, most: int) -> range:
        """Return tokens from start on, at most so many, as far as they are of one block."""
        block, offset = divmod(start, self.block_tokens)
        first = self.names[block] * self.block_tokens + offset
        return range(first, first + min(most, self.block_tokens - offset))


class NameHasher(BlockHasher):
    """Takes the name of the last block in a match unit, which has whole ones, for the hash."""

    def root(self, *, cache_salt: str = "", adapter: str = "") -> BlockHash:
        return ROOT

    def extend(self, hashes: list[BlockHash], root: BlockHash, token_ids: Any) -> None:
        stride = self.match_unit_tokens // token_ids.block_tokens
        end = len(token_ids) // self.match_unit_tokens
        hashes += token_ids.names[(len(hashes) + 1) * stride - 1 : end * stride : stride]


class TokenFreeRequest(Request):
    """A request of which only the blocks' names are known. No runner that computes can run it."""

    __slots__ = ()

    def __init__(self, request_id: str, tokens: NamedTokens, *args: Any, **kwargs: Any) -> None:
        """See Request; the hasher is a NameHasher."""
        super().__init__(request_id, cast(Sequence[int], tokens), *args, **kwargs)

    def _own_tokens(self, prompt_token_ids: Sequence[int]) -> list[int]:
        return cast(list[int], prompt_token_ids)

    def all_token_ids(self) -> tuple[int, ...]:
        return ()


class BlockNames:
    """Names the blocks of prompts: one number for each prefix, over all scopes."""

    def __init__(self) -> None:
        self._scopes: dict[str, int] = {}
        self._unknown = count(-1, -1)
        self._last: dict[str, tuple[BlockPrompt, list[int]]] = {}

    def tokens(
        self, session: str, prompt: BlockPrompt, num_answer_tokens: int, following: BlockPrompt | None
    ) -> NamedTokens:
        """Return a prompt's tokens and those of its answer.

        following: the session's next prompt. Where it begins with this one's full blocks it shows what the partly
        filled block and the answer hold; what nothing shows is equal to nothing.
        """
        size = prompt.block_tokens
        num_full, num_blocks = prompt.num_tokens // size, -(-(prompt.num_tokens + num_answer_tokens) // size)
        own = self._names(session, prompt)
        shown = own[:num_blocks]
        if prompt.names_answer:
            num_full = len(shown)
        if following is not None and (following.block_tokens, following.scope) == (size, prompt.scope):
            end = min(num_blocks, following.num_tokens // size)
            if end > num_full and self._part(following, num_full - 1, num_full) == own[num_full - 1 : num_full]:
                shown = own[:num_full] + self._part(following, num_full, end)
        missing = num_blocks - len(shown)
        return NamedTokens(shown + [next(self._unknown) for _ in range(missing)], prompt.num_tokens, size)

    def _names(self, session: str, prompt: BlockPrompt) -> list[int]:
        """Return the names of a prompt's blocks; those shared with the session's prompt before are the same objects."""
        before, known = self._last.get(session, (None, []))
        num_known = _num_equal(prompt.block_runs, before.block_runs) if before and before.scope == prompt.scope else 0
        names = known[:num_known] + self._part(prompt, num_known, None)
        self._last[session] = prompt, names
        return names

    def _part(self, prompt: BlockPrompt, start: int, end: int | None) -> list[int]:
        """Return the names of the blocks [start, end) of a prompt; below 0 there are none."""
        base = self._scopes.setdefault(prompt.scope, len(self._scopes)) << _SCOPE_BITS
        names: list[int] = []
        passed = 0
        for first, length in prompt.block_runs:
            low = max(start - passed, 0)
            high = length if end is None else min(end - passed, length)
            names += range(base + first + low, base + first + high)
            passed += length
        return names


def _num_equal(runs: Sequence[tuple[int, int]], others: Sequence[tuple[int, int]]) -> int:
    """Return how many of the first ids are equal."""
    num_equal = 0
    for (first, length), (other_first, other_length) in zip(runs, others, strict=False):
        if first != other_first:
            break
        num_equal += min(length, other_length)
        if length != other_length:
            break
    return num_equal


def with_chained_ids(prompts: Sequence[BlockPrompt]) -> list[BlockPrompt]:
    """Return the prompts with ids that name whole prefixes, as BlockPrompt wants them.

    Where an id of a scope always stands behind the same one, they do so already; otherwise they name single blocks,
    and all of the scope are numbered anew by what they are and what stands before them.
    """
    wrong = _unchained_scopes(prompts)
    numbers: dict[tuple[str, int, int], int] = {}
    return [_renumbered(prompt, numbers) if prompt.scope in wrong else prompt for prompt in prompts]


def _unchained_scopes(prompts: Sequence[BlockPrompt]) -> set[str]:
    """Return the scopes in which an id stands behind different ones."""
    before: dict[tuple[str, int], int] = {}
    inner: dict[str, list[tuple[int, int]]] = {}
    wrong = set()
    for prompt in prompts:
        last = -1
        for first, length in prompt.block_runs:
            if before.setdefault((prompt.scope, first), last) != last:
                wrong.add(prompt.scope)
            last = first + length - 1
            inner.setdefault(prompt.scope, []).append((first + 1, first + length))
    spans = {scope: _union(each) for scope, each in inner.items()}
    for (scope, first), last in before.items():
        # Within a run an id stands behind the one below it; is this one within any?
        index = bisect_right(spans[scope], (first, ENDLESS)) - 1
        if last != first - 1 and index >= 0 and first < spans[scope][index][1]:
            wrong.add(scope)
    return wrong


def _union(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join spans [start, end) that overlap; ascending."""
    joined: list[tuple[int, int]] = []
    for start, end in sorted(set(spans)):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(end, joined[-1][1])
        else:
            joined.append((start, end))
    return joined


def _renumbered(prompt: BlockPrompt, numbers: dict[tuple[str, int, int], int]) -> BlockPrompt:
    ids: list[int] = []
    for first, length in prompt.block_runs:
        for block_id in range(first, first + length):
            key = (prompt.scope, ids[-1] if ids else -1, block_id)
            ids.append(numbers.setdefault(key, len(numbers)))
    return replace(prompt, block_runs=as_runs(ids))
