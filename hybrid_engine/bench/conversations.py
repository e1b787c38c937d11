"""Which requests are of one conversation, where a trace doesn't tell but names their prompts' blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

from hybrid_engine.bench.calls import BlockCall

MOST_FOLLOWERS = 8
"""Requests that go on from one prompt: where more do, it is a beginning that all share, such as a system prompt."""


def in_conversations(calls: Iterable[BlockCall]) -> Iterator[BlockCall]:
    """Say of each request of what conversation it is: that of the latest one whose prompt's full blocks it begins with.

    A request that begins with no earlier prompt, or with one that more than MOST_FOLLOWERS go on from, begins another.
    Block ids stand for the whole prefix that they end.
    """
    calls = list(calls)
    ends = [_last_full_block(call) for call in calls]
    before = _what_they_go_on_from(calls, ends)
    followers = Counter(before)
    conversations: dict[int, str] = {}
    for call, end, earlier in zip(calls, ends, before, strict=True):
        name = call.session
        if earlier is not None and followers[earlier] <= MOST_FOLLOWERS:
            name = conversations[earlier]
        if end is not None:
            conversations[end] = name
        yield replace(call, conversation=name)


def _what_they_go_on_from(calls: list[BlockCall], ends: list[int | None]) -> list[int | None]:
    """Return for each the deepest of its blocks that ends an earlier prompt."""
    known: set[int] = set()
    found = []
    for call, end in zip(calls, ends, strict=True):
        found.append(next((block for block in _blocks_from_the_end(call) if block in known), None))
        if end is not None:
            known.add(end)
    return found


def _last_full_block(call: BlockCall) -> int | None:
    left = call.num_prompt_tokens // call.block_tokens
    last = None
    for first, count in call.block_runs:
        if left <= 0:
            break
        last = first + min(left, count) - 1
        left -= count
    return last


def _blocks_from_the_end(call: BlockCall) -> Iterator[int]:
    for first, count in reversed(call.block_runs):
        yield from range(first + count - 1, first - 1, -1)
