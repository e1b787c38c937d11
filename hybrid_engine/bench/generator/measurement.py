"""What a workload is like, measured the same way whether it was generated or read from a trace."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hybrid_engine.bench.prefix_tree import PrefixTree
from hybrid_engine.bench.workload import BlockPrompt, Prompt, TokenPrompt, WorkItem


@dataclass(frozen=True)
class Spread:
    """How a quantity is spread."""

    p50: float
    p90: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of some values; of none: zeros."""
        p50, p90 = np.quantile(values, [0.5, 0.9]) if values else (0.0, 0.0)
        return cls(float(p50), float(p90))


@dataclass(frozen=True)
class WorkloadStatistics:
    """The figures that published traces are described by."""

    num_calls: int
    num_sessions: int
    """Those of sub-agents counted."""
    prompt_tokens: Spread
    answer_tokens: Spread
    turns: Spread
    """Calls of a session."""
    think_s: Spread
    new_tokens: Spread
    """Of a prompt, behind what it has in common with the session's prompt before."""
    diverged_share: float
    """Share of the calls, but sessions' first ones, whose prompt leaves the one before ahead of its end."""
    dropped_tokens: Spread
    """Of the prompt before, by those that diverged."""
    reuse: float
    """Share of the prompt tokens that are a prefix of something earlier, as a cache without limits finds."""
    reuse_within_sessions: float
    """The same, where something earlier is of the same session."""


@dataclass
class _Sums:
    prompts: list[int] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    thinks: list[float] = field(default_factory=list)
    new: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    turns: dict[str, int] = field(default_factory=dict)
    num_following: int = 0
    num_reused: int = 0
    num_reused_within: int = 0


def measure(items: Iterable[WorkItem]) -> WorkloadStatistics:
    """Measure a workload, its calls taken in the order given.

    Blocks count as whole: what two prompts have in common is rounded down to whole blocks. A prompt that leaves the one
    before in its last whole block has not diverged: in published traces the end of a prompt is often hashed otherwise
    than what stands there later.
    """
    sums, seen = _Sums(), _Seen()
    seen_by: dict[str, _Seen] = {}
    previous: dict[str, Prompt] = {}
    for item in items:
        sums.prompts.append(item.prompt.num_tokens)
        sums.answers.append(item.num_answer_tokens)
        sums.turns[item.session] = sums.turns.get(item.session, 0) + 1
        if item.session in previous:
            _compare(sums, previous[item.session], item)
        previous[item.session] = item.prompt
        sums.num_reused += seen.take(item)
        sums.num_reused_within += seen_by.setdefault(item.session, _Seen()).take(item)
    return _statistics(sums)


def _statistics(sums: _Sums) -> WorkloadStatistics:
    num_tokens = max(1, sum(sums.prompts))
    return WorkloadStatistics(
        num_calls=len(sums.prompts),
        num_sessions=len(sums.turns),
        prompt_tokens=Spread.of(sums.prompts),
        answer_tokens=Spread.of(sums.answers),
        turns=Spread.of(list(sums.turns.values())),
        think_s=Spread.of(sums.thinks),
        new_tokens=Spread.of(sums.new),
        diverged_share=len(sums.dropped) / max(1, sums.num_following),
        dropped_tokens=Spread.of(sums.dropped),
        reuse=sums.num_reused / num_tokens,
        reuse_within_sessions=sums.num_reused_within / num_tokens,
    )


def _compare(sums: _Sums, before: Prompt, item: WorkItem) -> None:
    """Count what a call's prompt adds to the one before, and what it leaves."""
    common, known = common_tokens(before, item.prompt), before.num_tokens
    if isinstance(before, BlockPrompt):
        known -= known % before.block_tokens + before.block_tokens
    sums.num_following += 1
    sums.new.append(item.prompt.num_tokens - common)
    if common < known:
        sums.dropped.append(before.num_tokens - common)
    if item.think_s is not None:
        sums.thinks.append(item.think_s)


def common_tokens(one: Prompt, other: Prompt) -> int:
    """Return how many tokens two prompts begin with alike; of blocks, whole ones."""
    if isinstance(one, BlockPrompt) and isinstance(other, BlockPrompt):
        return _common_blocks(one.block_runs, other.block_runs) * one.block_tokens
    assert isinstance(one, TokenPrompt), one
    assert isinstance(other, TokenPrompt), other
    tree = PrefixTree()
    tree.add(_array(one))
    return tree.longest_prefix(_array(other))


def _common_blocks(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> int:
    """Runs may be cut differently where the ids go on ascending."""
    left, right = list(one[::-1]), list(other[::-1])
    num_common = 0
    while left and right and left[-1][0] == right[-1][0]:
        (first, num_left), (_, num_right) = left.pop(), right.pop()
        count = min(num_left, num_right)
        num_common += count
        if num_left > count:
            left.append((first + count, num_left - count))
        if num_right > count:
            right.append((first + count, num_right - count))
    return num_common


class _Seen:
    """All prompts and known answers until now."""

    def __init__(self) -> None:
        self._tree = PrefixTree()
        self._blocks: dict[str, _Ids] = {}

    def take(self, item: WorkItem) -> int:
        """Add a call; return how many tokens of its prompt begin something that was there."""
        prompt = item.prompt
        if isinstance(prompt, BlockPrompt):
            # An id names a whole prefix, so it is enough to know how many ids were there.
            blocks = self._blocks.setdefault(prompt.scope, _Ids())
            num_known = sum(blocks.add(first, first + count) for first, count in prompt.block_runs)
            return min(num_known * prompt.block_tokens, prompt.num_tokens)
        tokens = _array(prompt)
        num_known = self._tree.longest_prefix(tokens)
        answer = np.array([] if item.answer is None else item.answer, np.int64)
        self._tree.add(np.concatenate([tokens, answer]))
        return num_known


class _Ids:
    """A set of whole numbers, kept as ranges: those of a long conversation are a few."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Of ranges that are ascending, apart, and not adjacent; ends excluded."""

    def add(self, start: int, end: int) -> int:
        """Add a range; return how many of it were there."""
        low, high = bisect_left(self._ends, start), bisect_right(self._starts, end)
        touched = list(zip(self._starts[low:high], self._ends[low:high], strict=True))
        num_known = sum(min(end, right) - max(start, left) for left, right in touched)
        self._starts[low:high] = [min([start, *self._starts[low:high]])]
        self._ends[low:high] = [max([end, *self._ends[low:high]])]
        return num_known


def _array(prompt: TokenPrompt) -> np.ndarray:
    return np.concatenate([np.empty(0, np.int64), *(np.asarray(piece, np.int64) for piece in prompt.pieces)])
