"""Reasoning between markers, before the answer."""

from __future__ import annotations

from dataclasses import dataclass

from hybrid_engine.server.parsing.base import Event, Parser, Reasoning, Scanner


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models marks its reasoning."""

    begins: tuple[str, ...]
    ends: tuple[str, ...]
    wrappers: tuple[str, ...] = ()
    """Markers around the answer, which are no part of it."""

    @property
    def markers(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.begins, *self.ends, *self.wrappers)

    def is_open_in(self, prompt: str) -> bool:
        """Return whether a prompt ends inside reasoning: many templates begin it themselves."""
        last_begin = max(prompt.rfind(marker) for marker in self.begins)
        last_end = max(prompt.rfind(marker) for marker in self.ends)
        return last_begin > last_end and not prompt[last_begin:].split(">", 1)[-1].strip()


THINK = ReasoningFormat(("<think>",), ("</think>",))
GRANITE = ReasoningFormat(
    ("<think>", "Here is my thought process:", "Here's my thought process:"),
    ("</think>", "Here is my response:", "Here's my response:"),
    ("<response>", "</response>"),
)


class ReasoningParser:
    """Separates reasoning from the answer, which it hands to the next parser."""

    def __init__(self, form: ReasoningFormat, answer: Parser, *, is_open: bool = False) -> None:
        """answer: reads what is no reasoning. is_open: the prompt ended inside reasoning."""
        self._form = form
        self._answer = answer
        self._scanner = Scanner()
        self._is_inside = is_open
        self._has_reasoned = is_open
        self._may_begin = not is_open
        self._lead = ""
        """White space at the very start, which is dropped if reasoning follows."""
        self._is_at_start = True
        """Of the reasoning or of the answer: line ends there belong to the markers."""

    @property
    def is_inside(self) -> bool:
        """Whether what comes next is reasoning, as far as is known."""
        return self._is_inside

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
        """Return the rest; reasoning that never ended stays reasoning."""
        rest = self._scanner.rest()
        if self._is_inside:
            return self._reasoning(rest) + self._answer.finish()
        self._may_begin = False
        return self._text(self._take_lead() + rest) + self._answer.finish()

    def _advance(self) -> tuple[list[Event], bool]:
        """Handle the text up to the next marker; return what came of it and whether there was a marker."""
        if self._is_inside:
            text, marker = self._scanner.next(self._form.ends)
            events = self._reasoning(text)
            if marker is not None:
                self._is_inside, self._is_at_start = False, True
            return events, marker is not None
        if not self._may_begin:
            text, marker = self._scanner.next(self._form.wrappers)
            return self._text(text), marker is not None
        text, marker = self._scanner.next((*self._form.begins, *self._form.wrappers))
        self._lead += text
        if marker in self._form.begins and not self._lead.strip():
            self._is_inside = self._has_reasoned = True
        elif marker in self._form.begins:
            self._lead += marker or ""
        elif not self._lead.strip():
            return [], marker is not None
        self._may_begin = False
        return ([], True) if self._is_inside else (self._text(self._take_lead()), True)

    def _take_lead(self) -> str:
        lead, self._lead = self._lead, ""
        return lead

    def _reasoning(self, text: str) -> list[Event]:
        text = self._without_first_line_ends(text)
        return [Reasoning(text)] if text else []

    def _text(self, text: str) -> list[Event]:
        text = self._without_first_line_ends(text) if self._has_reasoned else text
        return self._answer.add(text) if text else []

    def _without_first_line_ends(self, text: str) -> str:
        if self._is_at_start:
            text = text.lstrip("\n")
            self._is_at_start = not text
        return text
