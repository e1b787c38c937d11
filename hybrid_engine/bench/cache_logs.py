"""A server's own cache log (`serve --cache-log`): the calls that it answered, and what its cache was made of."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hybrid_engine.bench.calls import BlockCall, Row, When, is_count, is_positive
from hybrid_engine.errors import TraceError
from hybrid_engine.groups.spec import ChunkedLocalSpec, FullAttentionSpec, LayerSpec, MambaSpec, SlidingWindowSpec

VERSION = 1
SPECS: Mapping[str, type[Any]] = {
    "full_attention": FullAttentionSpec,
    "sliding_window": SlidingWindowSpec,
    "chunked_local": ChunkedLocalSpec,
    "mamba": MambaSpec,
}


@dataclass(frozen=True)
class LoggedCall:
    """One answer."""

    call: BlockCall
    time_s: float
    """When it came, on the log's clock."""
    ttft_s: float | None
    total_s: float
    hit: int | None
    """Tokens that the server hit; None: not known."""


@dataclass(frozen=True)
class LogPart:
    """What one start of the server logged."""

    header: Row
    calls: tuple[LoggedCall, ...]
    """By the time at which they came."""

    def specs(self) -> dict[int, LayerSpec]:
        """Return what each layer keeps. Raises TraceError for what isn't known here."""
        found: dict[int, LayerSpec] = {}
        for values in self.header.get("layers", lambda value: isinstance(value, list), "a list of groups"):
            row = Row(values, f"{self.header.where}, layers")
            kind = SPECS[row.get("kind", SPECS.__contains__, f"one of {', '.join(SPECS)}")]
            given = {
                each.name: tuple(value) if isinstance(value := row.values.get(each.name), list) else value
                for each in fields(kind)
            }
            spec = kind(**given)
            found |= dict.fromkeys(row.get("layers", lambda value: isinstance(value, list), "layers"), spec)
        return found

    def count(self, name: str) -> int:
        """Return a number of the header."""
        found: int = self.header.get(name, is_count, "a whole number")
        return found


def read_parts(rows: Iterator[Row]) -> list[LogPart]:
    """Read a log, cut where the server was started. Raises TraceError, naming the line, for what is no such log."""
    parts: list[tuple[Row, list[Row]]] = []
    for row in rows:
        if "cache_log" in row.names:
            row.get("cache_log", VERSION.__eq__, f"{VERSION}, the version that is read here")
            parts.append((row, []))
        elif not parts:
            raise TraceError(f"{row.where}: the log does not begin with what the cache is made of (cache_log)")
        else:
            parts[-1][1].append(row)
    return [LogPart(header, _calls(lines, f"start {index}")) for index, (header, lines) in enumerate(parts)]


def read_cache_log(rows: Iterator[Row]) -> Iterator[BlockCall]:
    """Read a log as any other trace; numbers mean the same within one start of the server."""
    for part in read_parts(rows):
        for logged in part.calls:
            yield logged.call


def _calls(rows: Sequence[Row], scope: str) -> tuple[LoggedCall, ...]:
    times = sorted((_number(row, "time"), index) for index, row in enumerate(rows))
    conversations = _Conversations(scope)
    start_s = times[0][0] if times else 0.0
    return tuple(_logged(rows[index], time_s, start_s, conversations, scope) for time_s, index in times)


def _logged(row: Row, time_s: float, start_s: float, conversations: _Conversations, scope: str) -> LoggedCall:
    num_prompt = row.get("input_tokens", is_positive, "tokens, at least 1")
    num_answer = row.get("output_tokens", is_count, "tokens, at least 0")
    runs = tuple((first, count) for first, count in row.get("hash_runs", _are_runs, "pairs of first number and count"))
    if sum(count for _, count in runs) != num_prompt + num_answer:
        raise TraceError(f"{row.where}: hash_runs are {sum(c for _, c in runs):,} tokens, must be prompt and answer")
    ends = row.get("ends", lambda value: isinstance(value, list) and all(map(is_count, value)), "positions")
    total_s = _number(row, "total_s")
    session, think_s = conversations.place(runs, num_prompt, time_s, time_s + total_s)
    call = BlockCall(
        session=session,
        scope=scope,
        num_prompt_tokens=num_prompt,
        num_answer_tokens=max(num_answer, 1),
        block_runs=runs,
        block_tokens=1,
        message_boundaries=tuple(ends),
        when=When(arrival_s=time_s - start_s, think_s=think_s),
        names_answer=True,
    )
    ttft_s = None if row.values.get("ttft_s") is None else _number(row, "ttft_s")
    return LoggedCall(call, time_s, ttft_s, total_s, row.values.get("hit"))


class _Conversations:
    """Tells what a call came after, so that a replay keeps the log's order: calls of one session follow each other.

    A call that came while nothing was in flight goes on with the session whose call had ended last. Otherwise it goes
    on with the conversation that it is a turn of: the longest earlier prompt that it begins with.
    """

    def __init__(self, scope: str) -> None:
        self._scope = scope
        self._ends: list[int] = []
        """The numbers of prompts' last tokens, ascending."""
        self._session_of: dict[int, str] = {}
        """By the number of a prompt's last token."""
        self._ended_s: dict[str, float] = {}
        """When the last call of each session had ended."""

    def place(
        self, runs: Sequence[tuple[int, int]], num_prompt: int, start_s: float, end_s: float
    ) -> tuple[str, float | None]:
        """Return a call's session and, where it goes on with one, the seconds since its last call had ended."""
        prompt = _first_tokens(runs, num_prompt)
        last_to_end = max(self._ended_s, key=self._ended_s.__getitem__, default=None)
        if last_to_end is not None and self._ended_s[last_to_end] <= start_s:
            session = last_to_end
        else:
            before = self._find(_first_tokens(prompt, num_prompt - 1))
            session = self._session_of[before] if before is not None else ""
        think_s = start_s - self._ended_s.get(session, math.inf)
        if think_s < 0:
            session, think_s = f"{self._scope}, session {len(self._ended_s) + 1}", math.nan
        last = sum(prompt[-1]) - 1
        if last not in self._session_of:
            insort(self._ends, last)
        self._session_of[last] = session
        self._ended_s[session] = end_s
        return session, None if math.isnan(think_s) else think_s

    def _find(self, runs: Sequence[tuple[int, int]]) -> int | None:
        for first, count in reversed(runs):
            index = bisect_left(self._ends, first + count) - 1
            if index >= 0 and self._ends[index] >= first:
                return self._ends[index]
        return None


def _first_tokens(runs: Sequence[tuple[int, int]], num_tokens: int) -> list[tuple[int, int]]:
    kept, left = [], num_tokens
    for first, count in runs:
        if left <= 0:
            break
        kept.append((first, min(count, left)))
        left -= count
    return kept


def _number(row: Row, name: str) -> float:
    value = row.seconds(name)
    if value is None:
        raise TraceError(f"{row.where}: {name} is missing, must be seconds")
    return value


def _are_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(run, list) and len(run) == 2 and is_count(run[0]) and is_positive(run[1]) for run in value
    )
