"""The form of gpt-oss: messages in channels, with reasoning, answer and calls each in their own."""

from __future__ import annotations

import re

from hybrid_engine.server.parsing.base import Event, Reasoning, Scanner, Text, ToolCall

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|return|>", "<|call|>")
CONSTRAIN = "<|constrain|>"
MARKERS = (START, CHANNEL, MESSAGE, *ENDS, CONSTRAIN)


class HarmonyParser:
    """Reads channels: analysis is reasoning, what goes to a function is a call, all else is the answer."""

    def __init__(self, *, has_tools: bool = True) -> None:
        """has_tools: calls are told apart; else they are text."""
        self._has_tools = has_tools
        self._scanner = Scanner()
        self._header: str | None = ""
        """What was read of a message's header; None inside a message."""
        self._channel = "final"
        self._recipient: str | None = None
        self._arguments = ""

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is reasoning."""
        return self._header is None and self._channel == "analysis" and self._recipient is None

    def add(self, text: str) -> list[Event]:
        """Take the next piece; return what is certain by now."""
        self._scanner.add(text)
        events: list[Event] = []
        while True:
            events_now, has_more = self._advance()
            events += events_now
            if not has_more:
                return events

    def finish(self) -> list[Event]:
        """Return the rest: an answer without any channel is an answer all the same."""
        rest = self._scanner.rest()
        if self._header is None:
            return self._content(rest) + self._close()
        header = (self._header + rest).strip()
        return [Text(header)] if header and not any(marker in header for marker in MARKERS) else []

    def _advance(self) -> tuple[list[Event], bool]:
        if self._header is None:
            text, marker = self._scanner.next((START, CHANNEL, *ENDS))
            events = self._content(text)
            if marker is None:
                return events, False
            events += self._close()
            self._header = marker if marker in (START, CHANNEL) else ""
            return events, True
        text, marker = self._scanner.next((MESSAGE,))
        self._header += text
        if marker is not None:
            self._open(self._header)
        return [], marker is not None

    def _open(self, header: str) -> None:
        recipient = re.search(r"\bto=(?:functions\.)?([\w.\-]+)", header)
        channel = re.search(re.escape(CHANNEL) + r"\s*(\w+)", header)
        self._recipient = recipient[1] if recipient and self._has_tools else None
        self._channel = channel[1] if channel else "final"
        self._header, self._arguments = None, ""

    def _content(self, text: str) -> list[Event]:
        if self._recipient is not None:
            self._arguments += text
            return []
        if not text:
            return []
        return [Reasoning(text) if self._channel == "analysis" else Text(text)]

    def _close(self) -> list[Event]:
        recipient, self._recipient = self._recipient, None
        return [] if recipient is None else [ToolCall(recipient, self._arguments.strip() or "{}")]
