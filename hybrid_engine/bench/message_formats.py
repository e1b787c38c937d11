"""Traces with the text of their prompts: conversations, transcripts, logs of requests, SWE-agent's trajectories.

| format | a row is |
|---|---|
| calls | one model call: `session`, `messages` whole or what they add (`mode`), `output` |
| transcripts | one message of a conversation between agents: `session`, `turn`, `messages`, no answer |
| openai | one request as OpenAI's interfaces have it, with its response; or messages of which the last is the answer |
| swe-agent | a trajectory: `history`, or `trajectory` whose steps have the `query` that was sent |
| prompts | a text, as a JSON string or a line |
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from hashlib import blake2b
from typing import Any

from hybrid_engine.bench.calls import Message, MessageCall, Row, TextCall, When, are_messages, is_seconds_or_none
from hybrid_engine.errors import TraceError

NO_MODELS = ("human", "Computer_terminal", "ComputerTerminal")
"""Speakers in transcripts whose messages no model wrote."""
SESSION_NAMES = ("session", "session_id", "conversation_id", "conversation", "thread_id")
TIME_NAMES = ("arrival_s", "timestamp", "created", "created_at", "time")
ANSWER_NAMES = ("response", "output", "completion", "answer")
HIDDEN = ("agent", "message_type", "thought", "action", "tags", "cache_control", "is_demo")
"""What SWE-agent notes beside a message and no model sees; what it thought and did stands in content and tool_calls."""


def read_calls(rows: Iterator[Row]) -> Iterator[MessageCall]:
    """Read model calls of conversations."""
    histories: dict[str, tuple[Message, ...]] = {}
    for row in rows:
        session, messages = row.session(), row.messages()
        answer = row.get("output", lambda value: isinstance(value, str | dict), "a message or its text")
        mode = row.get("mode", ("full", "delta", None).__contains__, "'full' or 'delta'")
        if mode == "delta":
            if session not in histories:
                raise TraceError(f"{row.where}: it extends session {session!r}, of which there was no call before")
            messages = histories[session] + messages
        if not messages:
            raise TraceError(f"{row.where}: the prompt has no messages, must have at least one")
        answer = _as_answer(answer)
        histories[session] = (*messages, answer)
        when = When(arrival_s=row.seconds("arrival_s"), think_s=row.seconds("think_s"))
        yield MessageCall(session, messages, answer, when)


def read_transcripts(rows: Iterator[Row]) -> Iterator[MessageCall]:
    """Take each message that an agent wrote for a call of that agent: its system prompt, then all that was said."""
    said: dict[str, tuple[Message, ...]] = {}
    systems: dict[str, dict[str, str]] = {}
    for row in rows:
        session = row.session()
        if "system_prompts" in row.names:
            systems[session] = row.get("system_prompts", lambda value: isinstance(value, dict), "texts by agent")
        for message in row.messages():
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


# Requests as OpenAI's interfaces have them


def has_request(values: Any) -> bool:
    """Return whether an object is a log's row: it, or what it wraps, has messages."""
    return isinstance(values, dict) and are_messages(_request(values).get("messages"))


def read_openai(rows: Iterator[Row]) -> Iterator[MessageCall]:
    """Read a log of requests. Where it names no session, a request goes on with the one whose end it begins with."""
    sessions = _Sessions()
    first_time: float | None = None
    for row in rows:
        request = _request(row.values if isinstance(row.values, dict) else {})
        messages = list(Row(request, row.where).messages())
        answer = _find_answer(row.values)
        if answer is None:
            if len(messages) < 2 or messages[-1]["role"] != "assistant":
                raise TraceError(
                    f"{row.where}: there is no answer: none of {', '.join(ANSWER_NAMES)} and choices has one, and the "
                    f"last message is not the assistant's"
                )
            answer = messages.pop()
        if tools := request.get("tools") or request.get("functions"):
            messages.insert(0, {"role": "tools", "content": json.dumps(tools, ensure_ascii=False)})
        if not messages:
            raise TraceError(f"{row.where}: the prompt has no messages, must have at least one")
        time = _time(row)
        first_time = time if first_time is None else first_time
        arrival = None if time is None or first_time is None else max(0.0, time - first_time)
        named = next((row.values[name] for name in SESSION_NAMES if row.values.get(name) is not None), None)
        session = str(named) if named is not None else sessions.find(messages, answer)
        yield MessageCall(session, tuple(messages), answer, When(arrival_s=arrival))


def _request(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part that was sent: a batch file and many logs wrap it."""
    for name in ("body", "request", "params", "kwargs", "input"):
        if isinstance(values.get(name), dict):
            return _request(values[name])
    return values


def _find_answer(values: Any) -> Message | None:
    """Return the message that was answered, wherever a row has it; None where it has none."""
    if isinstance(values, str) and values:
        return _as_answer(values)
    if isinstance(values, list):
        return _find_answer(values[0]) if values else None
    if not isinstance(values, dict):
        return None
    if "role" in values and ("content" in values or "tool_calls" in values):
        return _as_answer(values)
    for name in ("choices", "message", "body", *ANSWER_NAMES):
        if name in values and (found := _find_answer(values[name])) is not None:
            return found
    return None


def _as_answer(answer: Any) -> Message:
    return {"role": "assistant", **(answer if isinstance(answer, dict) else {"content": answer})}


def _time(row: Row) -> float | None:
    for name in TIME_NAMES:
        value = row.values.get(name)
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError as error:
                raise TraceError(f"{row.where}: {name} is {value!r:.60}, must be seconds or an ISO time") from error
        if value is not None and is_seconds_or_none(value):
            # Logs count since the epoch in seconds or in milliseconds.
            return value / 1000 if value > 10**11 else float(value)
    return None


class _Sessions:
    """Finds the conversation that a request goes on with: the one whose prompt it begins with."""

    def __init__(self) -> None:
        self._by_beginning: dict[bytes, str] = {}
        self._num_sessions = 0

    def find(self, messages: list[Message], answer: Message) -> str:
        """Return the session of a request, a new one where none is gone on with."""
        digests = _digests([*messages, answer])
        known = (self._by_beginning[each] for each in reversed(digests[:-1]) if each in self._by_beginning)
        session = next(known, None)
        if session is None:
            self._num_sessions += 1
            session = f"session {self._num_sessions}"
        for digest in digests[-2:]:
            self._by_beginning[digest] = session
        return session


def _digests(messages: list[Message]) -> list[bytes]:
    """Name each beginning of a conversation."""
    digest, found = blake2b(digest_size=16), []
    for message in messages:
        part = json.dumps([message.get("role"), message.get("content"), message.get("tool_calls")]).encode()
        digest.update(len(part).to_bytes(8, "little") + part)
        found.append(digest.digest())
    return found


# Trajectories and plain texts


def read_swe_agent(rows: Iterator[Row]) -> Iterator[MessageCall]:
    """Read SWE-agent's trajectories, each a session: what each step sent, or else the history up to it."""
    for row in rows:
        steps = row.values.get("trajectory")
        has_queries = isinstance(steps, list) and steps and all(are_messages(step.get("query")) for step in steps)
        yield from _from_queries(row, steps) if has_queries else _from_history(row)


def _from_queries(row: Row, steps: list[dict[str, Any]]) -> Iterator[MessageCall]:
    for number, step in enumerate(steps):
        answer = {"role": "assistant", "content": step.get("response") or step.get("thought") or ""}
        if not step["query"]:
            raise TraceError(f"{row.where}, step {number}: its query has no messages, must have at least one")
        yield MessageCall(row.where, tuple(map(_seen, step["query"])), answer)


def _from_history(row: Row) -> Iterator[MessageCall]:
    said: list[Message] = []
    for message in row.messages("history"):
        # Messages of a demonstration were not answered, they were shown.
        if message["role"] == "assistant" and said and not message.get("is_demo"):
            yield MessageCall(row.where, tuple(said), _seen(message))
        said.append(_seen(message))


def _seen(message: Message) -> Message:
    return {name: value for name, value in message.items() if name not in HIDDEN}


def read_prompts(rows: Iterator[Row]) -> Iterator[TextCall]:
    """Read plain prompts, each a session of its own."""
    for number, row in enumerate(rows):
        if not isinstance(row.values, str) or not row.values:
            raise TraceError(f"{row.where}: it is {row.values!r:.60}, must be a text that is not empty")
        yield TextCall(f"prompt {number}", row.values)
