"""Tool calls between markers, or as bare JSON, inside an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.server.parsing.base import Event, Scanner, Text, ToolCall

CALL = "call"

Schemas = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    markers: Mapping[str, str | None]
    """What begins a call, or a list of them, and what ends it; None: the end of the answer."""
    read: Callable[[str, Schemas], list[ToolCall] | None]
    """Reads what stands between two markers; None: that is no call."""
    is_bare: bool = False
    """An answer that begins with a brace is a call too."""
    stops: tuple[str, ...] = ()
    """Texts behind the calls at which the answer ends."""
    enforced: tuple[str, ...] | None = None
    """The texts of an answer that is one call, with CALL for its JSON; None: calls can't be enforced."""
    argument_key: str = "arguments"

    @property
    def all_markers(self) -> tuple[str, ...]:
        """Beginnings and ends."""
        return (*self.markers, *(end for end in self.markers.values() if end is not None), *self.stops)


class ToolParser:
    """Finds the calls in an answer. What turns out to be none is given back as text, so that nothing is lost."""

    def __init__(self, form: ToolFormat, schemas: Schemas) -> None:
        self._form = form
        self._schemas = schemas
        self._scanner = Scanner()
        self._begin: str | None = None
        """The marker of the call that is being read; '' for a bare one; None outside."""
        self._body = ""
        self._spaces = ""
        """White space at the end of the text so far; in front of a call it is dropped."""
        self._has_begun = False
        self._has_calls = False

    def add(self, text: str) -> list[Event]:
        """Take the next piece; return what is certain by now."""
        self._scanner.add(text)
        events: list[Event] = []
        while True:
            events_now, has_more = self._inside() if self._begin is not None else self._outside()
            events += events_now
            if not has_more:
                return events

    def finish(self) -> list[Event]:
        """Return the rest: a call that is complete but for its end marker counts."""
        rest = self._scanner.rest()
        if self._begin is not None:
            return self._close(self._body + rest, "")
        events = self._text(rest)
        if self._begin is not None:
            return events + self._close(self._body, "")
        # An answer of calls alone has no text; white space behind a text belongs to it.
        return events if self._has_calls or not self._spaces else [*events, Text(self._spaces)]

    def _outside(self) -> tuple[list[Event], bool]:
        text, marker = self._scanner.next(self._form.markers)
        events = self._text(text)
        if self._begin is not None:  # a bare call began in the text
            self._scanner = _behind(self._scanner, marker)
            return events, True
        if marker is not None:
            self._begin, self._body, self._has_begun = marker, "", True
        return events, marker is not None

    def _inside(self) -> tuple[list[Event], bool]:
        assert self._begin is not None
        end = self._form.markers.get(self._begin)
        text, marker = self._scanner.next(() if end is None else (end,))
        self._body += text
        if marker is None:
            return [], False
        if _is_inside_string(self._body):
            self._body += marker  # the marker is a part of an argument
            return [], True
        return self._close(self._body, marker), True

    def _close(self, body: str, end: str) -> list[Event]:
        begin, self._begin, self._body = self._begin, None, ""
        calls = self._form.read(f"{begin}{body}{end}" if begin == "<function=" else body, self._schemas)
        spaces, self._spaces = self._spaces, ""
        self._has_calls = self._has_calls or bool(calls)
        return [*calls] if calls else [Text(f"{spaces}{begin}{body}{end}")]

    def _text(self, text: str) -> list[Event]:
        text = self._spaces + text
        if self._form.is_bare and not self._has_begun and text.lstrip().startswith("{"):
            self._begin, self._body, self._spaces, self._has_begun = "", text, "", True
            return []
        released = text.rstrip()
        self._spaces = text[len(released) :]
        self._has_begun = self._has_begun or bool(released)
        return [Text(released)] if released else []


def _behind(scanner: Scanner, marker: str | None) -> Scanner:
    """Return a scanner in front of a marker that was already taken."""
    found = Scanner()
    found.add((marker or "") + scanner.rest())
    return found


def read_json(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read calls in JSON: an object with 'name' and 'arguments' (or 'parameters'), a list of them, or several in a row.

    Returns None for anything else.
    """
    decoder = json.JSONDecoder()
    calls: list[ToolCall] = []
    body = body.strip()
    while body:
        try:
            value, end = decoder.raw_decode(body)
        except (ValueError, RecursionError):
            return None
        found = [_as_call(each) for each in (value if isinstance(value, list) else [value])]
        if not all(found):
            return None
        calls += [call for call in found if call is not None]
        body = body[end:].lstrip(" \t\r\n;,")
    return calls or None


def _as_call(value: Any) -> ToolCall | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # JSON in JSON
        return ToolCall(value["name"], arguments or "{}")
    if not isinstance(arguments, dict | None):
        return None
    return ToolCall(value["name"], json.dumps(arguments or {}, ensure_ascii=False))


def _is_inside_string(text: str) -> bool:
    """Return whether this is JSON that ends inside a string."""
    if text.lstrip()[:1] not in ("{", "["):
        return False
    is_inside = is_escaped = False
    for letter in text:
        if is_escaped:
            is_escaped = False
        elif letter == '"':
            is_inside = not is_inside
        elif letter == "\\":
            is_escaped = is_inside
    return is_inside
