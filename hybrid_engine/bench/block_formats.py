"""Traces that name a prompt's blocks and nothing of its text: Mooncake's release, kv-cache-tester's sessions, ours.

| format | a row is | sources |
|---|---|---|
| blocks | one request: `hash_ids` or `hash_runs`, `input_tokens`, `output_tokens`, `block_tokens` | ours |
| mooncake | one request: `hash_ids` of 512 tokens, `input_length`, `output_length`, `timestamp` | arXiv 2407.00079 |
| weka | one session: `block_size` and `requests`, sub-agents nested in them | kv-cache-tester's traces |

In rows with a `session`, ids are local to it; its `stream`s are agents that run side by side.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from hybrid_engine.bench.calls import BlockCall, Row, When, is_count, is_positive
from hybrid_engine.bench.conversations import in_conversations
from hybrid_engine.errors import TraceError

MOONCAKE_BLOCK_TOKENS = 512
MAX_BLOCK_ID, MAX_BLOCK_TOKENS = 2**31, 8192
BLOCK_SIZES = f"tokens, from 1 to {MAX_BLOCK_TOKENS:,}"
MAIN = "main"


def read_mooncake(rows: Iterator[Row]) -> Iterator[BlockCall]:
    """Read Mooncake's release as it is: each request is a session of its own, for it comes when it came."""
    yield from in_conversations(_mooncake(row, number) for number, row in enumerate(rows))


def read_blocks(rows: Iterator[Row]) -> Iterator[BlockCall]:
    """Read rows of one request each; those of a session follow each other."""
    numbered = enumerate(rows)
    for session, group in groupby(numbered, key=lambda pair: pair[1].session() if "session" in pair[1].names else None):
        if session is None:
            yield from in_conversations(_single(row, number) for number, row in group)
        else:
            yield from _with_agents([_streamed(row, session) for _, row in group])


def read_weka(rows: Iterator[Row]) -> Iterator[BlockCall]:
    """Read whole sessions, each a document with its sub-agents nested in it."""
    for number, document in enumerate(rows):
        session = str(document.values.get("id", f"session {number}"))
        # 'global': ids mean the same in every file.
        scope = "" if document.values.get("hash_id_scope") == "global" else session
        size = document.get("block_size", _is_block_size, BLOCK_SIZES)
        yield from _with_agents(list(_requests(document, session, session, scope, size)))


@dataclass(frozen=True, slots=True)
class _Streamed:
    """A call of one of a session's agents, on the session's clock."""

    call: BlockCall
    is_main: bool
    start_s: float
    end_s: float


def _mooncake(row: Row, number: int) -> BlockCall:
    time_ms = row.seconds("timestamp")
    return _call(
        row,
        session=f"row {number}",
        scope="",
        names=("input_length", "output_length"),
        block_tokens=MOONCAKE_BLOCK_TOKENS,
        when=When(arrival_s=None if time_ms is None else time_ms / 1000),
    )


def _single(row: Row, number: int) -> BlockCall:
    size = row.get("block_tokens", _is_block_size, BLOCK_SIZES)
    when = When(arrival_s=row.seconds("arrival_s"))
    return _call(row, session=f"row {number}", scope="", names=OURS, block_tokens=size, when=when)


OURS = ("input_tokens", "output_tokens")


def _streamed(row: Row, session: str) -> _Streamed:
    stream = row.values.get("stream", MAIN)
    size = row.get("block_tokens", _is_block_size, BLOCK_SIZES)
    call = _call(
        row,
        session=session if stream == MAIN else f"{session}/{str(stream).removeprefix('main/')}",
        scope=session,
        names=OURS,
        block_tokens=size,
        when=When(think_s=row.seconds("think_s")),
        boundary=_boundary(row),
    )
    start = row.seconds("arrival_s") or 0.0
    return _Streamed(call, stream == MAIN, start, start + (row.seconds("api_s") or 0.0))


def _requests(document: Row, agent: str, session: str, scope: str, size: int) -> Iterator[_Streamed]:
    requests = document.get("requests", lambda value: isinstance(value, list), "a list of requests")
    boundary, num_agents = _boundary(document), 0
    for index, values in enumerate(requests):
        row = Row(values, f"{document.where}, request {index}")
        if "requests" in row.names:
            num_agents += 1
            yield from _requests(row, f"{agent}/{values.get('agent_id') or num_agents}", session, scope, size)
            continue
        when = When(think_s=row.seconds("think_time"))
        call = _call(
            row, session=agent, scope=scope, names=("in", "out"), block_tokens=size, when=when, boundary=boundary
        )
        start = row.seconds("t") or 0.0
        yield _Streamed(call, agent == session, start, start + (row.seconds("api_time") or 0.0))


def _boundary(row: Row) -> int:
    """Return where the tools and the system prompt end, which stand first; 0: the trace doesn't tell."""
    sizes = [row.values.get(name) or 0 for name in ("tool_tokens", "system_tokens")]
    return sum(sizes) if all(map(is_count, sizes)) else 0


def _with_agents(streamed: Sequence[_Streamed]) -> Iterator[BlockCall]:
    """Say of each sub-agent after which of the main agent's calls it began, and of those which waited for its end."""
    main = [each for each in streamed if each.is_main]
    agents: dict[str, list[_Streamed]] = {}
    for each in streamed:
        if not each.is_main:
            agents.setdefault(each.call.session, []).append(each)
    if not main:
        yield from (each.call for each in streamed)
        return
    starts = [each.start_s for each in main]
    ended = sorted((calls[-1].end_s, name) for name, calls in agents.items())
    started: set[str] = set()
    for each in streamed:
        call = each.call
        if each.is_main:
            waits_for = []
            while ended and ended[0][0] <= each.start_s:
                waits_for.append(ended.pop(0)[1])
            # A main agent's report of it can't be awaited where it never began in the file's order.
            yield replace(call, when=replace(call.when, waits_for=tuple(n for n in waits_for if n in started)))
        elif call.session in started:
            yield call
        else:
            started.add(call.session)
            turn = max(0, bisect_right(starts, each.start_s) - 1)
            think = max(0.0, each.start_s - main[turn].end_s)
            yield replace(call, when=When(think_s=think, parent=main[0].call.session, parent_turn=turn))


def _call(
    row: Row,
    *,
    session: str,
    scope: str,
    names: tuple[str, str],
    block_tokens: int,
    when: When,
    boundary: int = 0,
) -> BlockCall:
    num_tokens = row.get(names[0], is_positive, "tokens, at least 1")
    num_answer = row.get(names[1], is_count, "tokens, at least 0")
    runs = _block_runs(row)
    num_covered = sum(count for _, count in runs) * block_tokens
    if num_covered >= num_tokens + block_tokens:
        raise TraceError(f"{row.where}: blocks for {num_covered:,} tokens, the prompt has {num_tokens:,}")
    boundaries = (boundary,) if 0 < boundary < num_tokens else ()
    return BlockCall(session, scope, num_tokens, max(num_answer, 1), runs, block_tokens, boundaries, when)


def _block_runs(row: Row) -> tuple[tuple[int, int], ...]:
    if row.values.get("hash_runs") is not None:
        return tuple((first, count) for first, count in row.get("hash_runs", _is_runs, "pairs of first id and count"))
    return as_runs(row.get("hash_ids", are_block_ids, "block ids"))


def as_runs(ids: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Write ids as runs of ascending ones."""
    runs: list[tuple[int, int]] = []
    for block_id in ids:
        if runs and sum(runs[-1]) == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return tuple(runs)


def are_block_ids(value: Any) -> bool:
    """Return whether a value is a list of block ids."""
    return isinstance(value, list) and all(map(_is_block_id, value))


def _is_block_size(value: Any) -> bool:
    return is_positive(value) and value <= MAX_BLOCK_TOKENS


def _is_block_id(value: Any) -> bool:
    return is_count(value) and value < MAX_BLOCK_ID


def _is_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(run, list) and len(run) == 2 and _is_block_id(run[0]) and is_positive(run[1]) for run in value
    )
