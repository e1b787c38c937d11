"""Traces of real use, read into model calls: one reader for each format, found by what the first row holds.

| format | a row is | recognised by |
|---|---|---|
| calls | one model call of a conversation, its messages whole or what they add | `messages` and `output` |
| transcripts | one message of a conversation between agents | `messages` without `output` |
| blocks | one request as hashes of its prompt's blocks | `hash_ids` or `hash_runs` |

JSON lines, gzipped or not; a folder is read file by file. Mooncake's release (`input_length`, `output_length`, blocks
of 512 tokens, arXiv 2407.00079) is read as it is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.errors import TraceError

Message = Mapping[str, Any]
"""As chat interfaces have it: a role, a content, and whatever else a model gets to see."""

SUFFIXES = (".jsonl", ".jsonl.gz")
MOONCAKE_BLOCK_TOKENS = 512
MAX_BLOCK_ID, MAX_BLOCK_TOKENS = 2**31, 8192
BLOCK_SIZES = f"tokens, from 1 to {MAX_BLOCK_TOKENS:,}"
NO_MODELS = ("human", "Computer_terminal", "ComputerTerminal")
"""Speakers in transcripts whose messages no model wrote."""


@dataclass(frozen=True, slots=True)
class MessageCall:
    """A model call whose prompt is a list of messages."""

    session: str
    """Calls of one session follow each other."""
    messages: tuple[Message, ...]
    answer: Message


@dataclass(frozen=True, slots=True)
class BlockCall:
    """A model call of which only the identity of its prompt's blocks is known."""

    session: str
    scope: str
    """Equal block ids stand for equal tokens within one scope."""
    num_prompt_tokens: int
    num_answer_tokens: int
    block_runs: tuple[tuple[int, int], ...]
    """(first id, how many ascending ids) in the prompt's order; what is left of the prompt matches nothing."""
    block_tokens: int


Call = MessageCall | BlockCall


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a trace."""

    values: dict[str, Any]
    where: str
    """File and line, for messages."""

    def get(self, name: str, is_right: Callable[[Any], bool], wanted: str) -> Any:
        """Return a value. Raises TraceError when it is missing or not what is wanted."""
        value = self.values.get(name)
        if not is_right(value):
            raise TraceError(f"{self.where}: {name} is {value!r:.60}, must be {wanted}")
        return value


def read_trace(path: Path, *, num_sessions: int | None = None) -> list[Call]:
    """Return the calls of a trace in its order, those of the first num_sessions sessions.

    path: a file, or a folder of them. None: all sessions.
    Raises TraceError, which names file and line, for what can't be read or can't be replayed.
    """
    kept: dict[str, None] = {}
    calls = []
    for call in _calls_of(_rows(path)):
        if call.session not in kept and (num_sessions is None or len(kept) < num_sessions):
            kept[call.session] = None
        if call.session in kept:
            calls.append(call)
    if not calls:
        raise TraceError(f"{path} holds no model calls: give a trace with at least one")
    return calls


def _rows(path: Path) -> Iterator[Row]:
    files = sorted(each for each in path.iterdir() if each.name.endswith(SUFFIXES)) if path.is_dir() else [path]
    if not files:
        raise TraceError(f"{path} holds no trace: a file whose name ends in {' or '.join(SUFFIXES)} is needed")
    for file in files:
        opened = gzip.open if file.suffix == ".gz" else open
        try:
            with opened(file, "rt", encoding="utf-8") as lines:
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        yield Row(_object(line, where := f"{file.name}, line {number}"), where)
        except (OSError, EOFError, UnicodeDecodeError) as error:
            raise TraceError(f"{file} can't be read: {error}") from error


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise TraceError(f"{where}: no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TraceError(f"{where}: it is {value!r:.60}, must be a JSON object")
    return value


def _calls_of(rows: Iterator[Row]) -> Iterator[Call]:
    first = next(rows, None)
    if first is None:
        return
    yield from _reader(first)(_chain(first, rows))


def _chain(first: Row, rows: Iterator[Row]) -> Iterator[Row]:
    yield first
    yield from rows


def _reader(row: Row) -> Callable[[Iterator[Row]], Iterator[Call]]:
    names = row.values
    if "messages" in names:
        return _read_calls if "output" in names else _read_transcripts
    if names.get("hash_ids") is not None or names.get("hash_runs") is not None:
        return _read_blocks
    if "hash_ids" in names or "input_tokens" in names:
        raise TraceError(f"{row.where}: there are lengths but no hash_ids: nothing tells which prompts share a prefix")
    raise TraceError(
        f"{row.where}: the format is not known, the row has {sorted(names)!r:.200}; it must have messages and output, "
        f"messages and session, or hash_ids (hash_runs) and input_tokens"
    )


def _read_calls(rows: Iterator[Row]) -> Iterator[Call]:
    histories: dict[str, tuple[Message, ...]] = {}
    for row in rows:
        session, messages = _session(row), _messages(row)
        answer = row.get("output", lambda value: isinstance(value, str | dict), "a message or its text")
        mode = row.get("mode", ("full", "delta", None).__contains__, "'full' or 'delta'")
        if mode == "delta":
            if session not in histories:
                raise TraceError(f"{row.where}: it extends session {session!r}, of which there was no call before")
            messages = histories[session] + messages
        if not messages:
            raise TraceError(f"{row.where}: the prompt has no messages, must have at least one")
        answer = {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}
        histories[session] = (*messages, answer)
        yield MessageCall(session, messages, answer)


def _read_transcripts(rows: Iterator[Row]) -> Iterator[Call]:
    """Take each message that an agent wrote for a call of that agent: its system prompt, then all that was said."""
    said: dict[str, tuple[Message, ...]] = {}
    systems: dict[str, dict[str, str]] = {}
    for row in rows:
        session = _session(row)
        if "system_prompts" in row.values:
            systems[session] = row.get("system_prompts", lambda value: isinstance(value, dict), "texts by agent")
        for message in _messages(row):
            before = said.get(session, ())
            speaker = _speaker(message)
            if before and speaker not in NO_MODELS:
                system = systems.get(session, {}).get(speaker)
                heard = tuple(_as_heard_by(speaker, each) for each in before)
                prompt = ({"role": "system", "content": system}, *heard) if system else heard
                yield MessageCall(session, prompt, _as_heard_by(speaker, message))
            said[session] = (*before, message)


def _speaker(message: Message) -> str:
    """Return who wrote a message: 'Orchestrator (thought)' is the Orchestrator."""
    return str(message.get("name") or message.get("role")).partition(" (")[0]


def _as_heard_by(agent: str, message: Message) -> Message:
    return {**message, "role": "assistant" if _speaker(message) == agent else "user"}


def _read_blocks(rows: Iterator[Row]) -> Iterator[Call]:
    for number, row in enumerate(rows):
        is_release = "input_length" in row.values
        num_tokens = row.get("input_length" if is_release else "input_tokens", _is_positive, "tokens, at least 1")
        num_answer = row.get("output_length" if is_release else "output_tokens", _is_count, "tokens, at least 0")
        block_tokens = MOONCAKE_BLOCK_TOKENS if is_release else row.get("block_tokens", _is_block_size, BLOCK_SIZES)
        runs = _block_runs(row)
        num_covered = sum(count for _, count in runs) * block_tokens
        if num_covered >= num_tokens + block_tokens:
            raise TraceError(f"{row.where}: blocks for {num_covered:,} tokens, the prompt has {num_tokens:,}")
        scope = _session(row) if "session" in row.values else ""
        yield BlockCall(scope or f"row {number}", scope, num_tokens, max(num_answer, 1), runs, block_tokens)


def _block_runs(row: Row) -> tuple[tuple[int, int], ...]:
    if row.values.get("hash_runs") is not None:
        return tuple((first, count) for first, count in row.get("hash_runs", _is_runs, "pairs of first id and count"))
    ids = row.get("hash_ids", lambda value: isinstance(value, list) and all(map(_is_block_id, value)), "block ids")
    runs: list[tuple[int, int]] = []
    for block_id in ids:
        if runs and sum(runs[-1]) == block_id:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block_id, 1))
    return tuple(runs)


def _session(row: Row) -> str:
    return str(row.get("session", lambda value: isinstance(value, str | int), "the conversation's name"))


def _messages(row: Row) -> tuple[Message, ...]:
    def is_right(value: Any) -> bool:
        return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)

    return tuple(row.get("messages", is_right, "a list of messages like {'role': 'user', 'content': '…'}"))


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_positive(value: Any) -> bool:
    return _is_count(value) and value > 0


def _is_block_size(value: Any) -> bool:
    return _is_positive(value) and value <= MAX_BLOCK_TOKENS


def _is_block_id(value: Any) -> bool:
    return _is_count(value) and value < MAX_BLOCK_ID


def _is_runs(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(run, list) and len(run) == 2 and _is_block_id(run[0]) and _is_positive(run[1]) for run in value
    )
