"""Traces of real use, read into model calls: which file is of which format is told from what it holds.

The formats stand in message_formats.py and block_formats.py. A file is JSON lines, one JSON document, or plain text;
gzipped or not; a folder is read file by file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hybrid_engine.bench.block_formats import read_blocks, read_mooncake, read_weka
from hybrid_engine.bench.cache_logs import read_cache_log
from hybrid_engine.bench.calls import BlockCall, Call, Message, MessageCall, Row
from hybrid_engine.bench.message_formats import (
    has_request,
    read_calls,
    read_openai,
    read_prompts,
    read_swe_agent,
    read_transcripts,
)
from hybrid_engine.errors import TraceError

__all__ = ["BlockCall", "Call", "Message", "MessageCall", "read_trace"]

AUTO = "auto"
SUFFIXES = (".jsonl", ".json", ".traj", ".txt")
GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Format:
    """One way in which traces are written."""

    matches: Callable[[Any], bool]
    """Whether the first row of a file is of this format."""
    read: Callable[[Iterator[Row]], Iterator[Call]]
    needs: str
    """What its rows must have, in words."""


def _has(*names: str) -> Callable[[Any], bool]:
    return lambda values: isinstance(values, dict) and all(values.get(name) is not None for name in names)


def _is_transcript(values: Any) -> bool:
    if not _has("session", "messages")(values) or {"output", "response", "model"} & set(values):
        return False
    return "turn" in values or any("name" in message for message in values["messages"] if isinstance(message, dict))


FORMATS = {
    "cache-log": Format(_has("cache_log"), read_cache_log, "cache_log, in its first line"),
    "calls": Format(_has("messages", "output", "session"), read_calls, "session, messages and output"),
    "transcripts": Format(_is_transcript, read_transcripts, "session, turn and messages"),
    "openai": Format(has_request, read_openai, "messages, also inside body or request"),
    "mooncake": Format(_has("hash_ids", "input_length"), read_mooncake, "hash_ids and input_length"),
    "blocks": Format(
        lambda values: _has("hash_ids", "input_tokens")(values) or _has("hash_runs", "input_tokens")(values),
        read_blocks,
        "hash_ids or hash_runs, and input_tokens",
    ),
    "weka": Format(_has("requests", "block_size"), read_weka, "requests and block_size"),
    "swe-agent": Format(
        lambda values: _has("history")(values) or _has("trajectory")(values),
        read_swe_agent,
        "history or trajectory",
    ),
    "prompts": Format(lambda values: isinstance(values, str), read_prompts, "a text a line"),
}
"""By name, in the order in which they are tried."""


@dataclass(frozen=True)
class Part:
    """Every so many-th session of a trace: one part to choose settings by, another to tell what they are worth."""

    number: int = 1
    """From 1 on."""
    of: int = 1

    @classmethod
    def parse(cls, text: str) -> Part:
        """Read '1/2': the first, third, … session. Raises TraceError for anything else."""
        number, _, of = text.partition("/")
        if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
            raise TraceError(
                f"part is {text!r}, must be like '1/2' (the first, third, … session) or '2/2' (the others)"
            )
        return cls(int(number), int(of))

    def has(self, index: int) -> bool:
        """Return whether the session with an index, from 0 on, is of this part."""
        return index % self.of == self.number - 1


WHOLE = Part()


def read_trace(path: Path, *, format: str = AUTO, num_sessions: int | None = None, part: Part = WHOLE) -> list[Call]:
    """Return the calls of a trace in its order, those of the part's first num_sessions sessions and their sub-agents.

    Where requests are sessions of their own, those of one conversation count as one session here.

    path: a file, or a folder of them. format: a key of FORMATS, or 'auto'. None: all sessions.
    Raises TraceError, which names file and line, for what can't be read or can't be replayed.
    """
    if format not in (AUTO, *FORMATS):
        raise TraceError(f"format is {format!r}, must be one of {', '.join((AUTO, *FORMATS))}")
    roots: dict[str, str] = {}
    is_kept: dict[str, bool] = {}
    num_kept = 0
    calls = []
    for call in _calls_of(path, format):
        name = getattr(call, "conversation", "") or call.session
        root = roots.setdefault(name, roots.get(call.when.parent or "", name))
        if root not in is_kept:
            is_kept[root] = part.has(len(is_kept)) and (num_sessions is None or num_kept < num_sessions)
            num_kept += is_kept[root]
        if is_kept[root]:
            calls.append(call)
    if not calls:
        which = f" in part {part.number}/{part.of}" if is_kept else ""
        raise TraceError(f"{path} holds no model calls{which}: give a trace with at least one")
    return calls


def _calls_of(path: Path, format: str) -> Iterator[Call]:
    found: dict[str, str] = {}
    files: list[Iterator[Row]] = []
    for file in _files(path):
        rows = _rows(file)
        first = next(rows, None)
        if first is not None:
            found.setdefault(_detect(first) if format == AUTO else format, file.name)
            files.append(chain([first], rows))
    if len(found) > 1:
        seen = ", ".join(f"{name} in {file}" for name, file in found.items())
        raise TraceError(f"{path} holds several formats: {seen}; give a folder of one format, or one file")
    for name in found:
        yield from FORMATS[name].read(chain.from_iterable(files))


def _detect(row: Row) -> str:
    for name, each in FORMATS.items():
        if each.matches(row.values):
            return name
    if {"hash_ids", "input_tokens"} & set(row.names):
        raise TraceError(f"{row.where}: there are lengths but no hash_ids: nothing tells which prompts share a prefix")
    seen = f"the row has {sorted(row.names)!r:.200}" if row.names else f"it is {row.values!r:.60}"
    known = "; ".join(f"{name}: {each.needs}" for name, each in FORMATS.items())
    raise TraceError(f"{row.where}: the format is not known, {seen}. Known are {known}")


def rows_of(path: Path) -> Iterator[Row]:
    """Iterate over a trace's lines, or the documents that its files are, whatever their format."""
    for file in _files(path):
        yield from _rows(file)


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(each for each in path.iterdir() if each.name.removesuffix(".gz").endswith(SUFFIXES))
    if not files:
        raise TraceError(f"{path} holds no trace: a file whose name ends in {', '.join(SUFFIXES)}, or .gz behind it")
    return files


def _rows(file: Path) -> Iterator[Row]:
    try:
        with file.open("rb") as raw:
            is_packed = raw.read(2) == GZIP_MAGIC
        if file.suffix == ".gz" and not is_packed:
            raise TraceError(f"{file} can't be read: its name ends in .gz, and it is not gzipped")
        with gzip.open(file, "rt", encoding="utf-8") if is_packed else file.open(encoding="utf-8") as lines:
            yield from _lines(file, lines)
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise TraceError(f"{file} can't be read: {error}") from error


def _lines(file: Path, lines: Any) -> Iterator[Row]:
    """Take each line for a row, or the whole file for a document where the first line is no JSON but the whole is."""
    numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    first = next(numbered, None)
    if first is None:
        return
    is_text = first[1].lstrip()[0] not in '{["'
    try:
        value = None if is_text else json.loads(first[1])
    except json.JSONDecodeError as error:
        yield from _document(file, first[1] + "".join(lines), error)
        return
    if isinstance(value, list):
        yield from _document(file, first[1] + "".join(lines), None)
        return
    for number, line in chain([first], numbered):
        where = f"{file.name}, line {number}"
        try:
            yield Row(line.rstrip("\n") if is_text else json.loads(line), where)
        except json.JSONDecodeError as error:
            raise TraceError(f"{where}: no valid JSON: {error}") from error


def _document(file: Path, text: str, error: json.JSONDecodeError | None) -> Iterator[Row]:
    try:
        values = json.loads(text)
    except json.JSONDecodeError as whole:
        raise TraceError(f"{file.name}, line 1: no valid JSON: {error or whole}; nor is the whole file") from whole
    if isinstance(values, list):
        yield from (Row(each, f"{file.name}, entry {index}") for index, each in enumerate(values))
    else:
        yield Row(values, file.name)
