"""What a trace is read into: model calls, as messages or as the identities of their blocks, and when each came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_engine.errors import TraceError

Message = Mapping[str, Any]
"""As chat interfaces have it: a role, a content, and whatever else a model gets to see."""


@dataclass(frozen=True, slots=True)
class When:
    """When a call came, as far as the trace tells; the fields are those of `workload.WorkItem`."""

    arrival_s: float | None = None
    think_s: float | None = None
    parent: str | None = None
    parent_turn: int = 0
    waits_for: tuple[str, ...] = ()


UNKNOWN = When()


@dataclass(frozen=True, slots=True)
class MessageCall:
    """A model call whose prompt is a list of messages."""

    session: str
    """Calls of one session follow each other."""
    messages: tuple[Message, ...]
    answer: Message
    when: When = UNKNOWN


@dataclass(frozen=True, slots=True)
class TextCall:
    """A model call whose prompt is a text; what was answered is not known."""

    session: str
    text: str
    num_answer_tokens: int = 1
    when: When = UNKNOWN


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
    message_boundaries: tuple[int, ...] = ()
    """Tokens of the prompt after which a message ends, where the trace tells."""
    when: When = UNKNOWN
    names_answer: bool = False
    """Whether the runs go on through the answer."""
    conversation: str = ""
    """Sessions of one name here are one conversation, and stay in one part of a trace; "": the session is one."""


Call = MessageCall | TextCall | BlockCall


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a trace, or one whole document."""

    values: Any
    where: str
    """File and line, for messages."""

    @property
    def names(self) -> tuple[str, ...]:
        """The keys of an object; none for anything else."""
        return tuple(self.values) if isinstance(self.values, dict) else ()

    def get(self, name: str, is_right: Callable[[Any], bool], wanted: str) -> Any:
        """Return a value. Raises TraceError when it is missing or not what is wanted."""
        if not isinstance(self.values, dict):
            raise TraceError(f"{self.where}: it is {self.values!r:.60}, must be a JSON object")
        value = self.values.get(name)
        if not is_right(value):
            raise TraceError(f"{self.where}: {name} is {value!r:.60}, must be {wanted}")
        return value

    def seconds(self, name: str) -> float | None:
        """Return a duration or a time; None where there is none."""
        return self.get(name, is_seconds_or_none, "seconds, at least 0, or null")

    def session(self, name: str = "session") -> str:
        """Return the conversation's name."""
        return str(self.get(name, lambda value: isinstance(value, str | int), "the conversation's name"))

    def messages(self, name: str = "messages") -> tuple[Message, ...]:
        """Return a list of messages."""
        return tuple(self.get(name, are_messages, "a list of messages like {'role': 'user', 'content': '…'}"))


def are_messages(value: Any) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list) and all(isinstance(each, dict) and "role" in each for each in value)


def is_count(value: Any) -> bool:
    """Return whether a value is a whole number that is not negative."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_positive(value: Any) -> bool:
    """Return whether a value is a whole number of at least 1."""
    return is_count(value) and value > 0


def is_seconds_or_none(value: Any) -> bool:
    """Return whether a value is a time that is not negative, or none."""
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and value >= 0)
