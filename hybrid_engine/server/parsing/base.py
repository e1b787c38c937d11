"""What parsers give out, and the search for markers in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A whole call."""

    name: str
    arguments: str
    """JSON, as the model wrote it where it wrote JSON."""


Event = Text | Reasoning | ToolCall


class Parser(Protocol):
    """Reads one answer. However its text is cut into pieces, the same comes out."""

    def add(self, text: str) -> list[Event]:
        """Take the next piece; return what is certain by now."""

    def finish(self) -> list[Event]:
        """Return the rest: the answer ended, also where something in it did not."""


class PlainParser:
    """All of the text is the answer."""

    def add(self, text: str) -> list[Event]:
        """Return the piece."""
        return [Text(text)] if text else []

    def finish(self) -> list[Event]:
        """Return nothing: nothing is held back."""
        return []


class Scanner:
    """Cuts a text that comes in pieces at markers; what may become a marker is held back."""

    def __init__(self) -> None:
        self._buffer = ""

    def add(self, text: str) -> None:
        """Take the next piece."""
        self._buffer += text

    def next(self, markers: Iterable[str]) -> tuple[str, str | None]:
        """Return the text up to the first of these markers and that marker, or what is surely before any, and None.

        Of markers that begin at the same place the longest counts.
        """
        markers = tuple(markers)
        found = [(self._buffer.find(marker), -len(marker), marker) for marker in markers]
        found = [each for each in found if each[0] >= 0]
        if found:
            start, _, marker = min(found)
            text, self._buffer = self._buffer[:start], self._buffer[start + len(marker) :]
            return text, marker
        end = len(self._buffer) - self._num_held(markers)
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        return text, None

    def rest(self) -> str:
        """Return what is held back and hold nothing."""
        rest, self._buffer = self._buffer, ""
        return rest

    def _num_held(self, markers: tuple[str, ...]) -> int:
        longest = max(map(len, markers), default=1) - 1
        for num in range(min(longest, len(self._buffer)), 0, -1):
            if any(marker.startswith(self._buffer[-num:]) for marker in markers):
                return num
        return 0
