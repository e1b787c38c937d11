"""Writes chat completions, whole or in chunks."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_engine.outputs import CompletionOutput, RequestOutput
from hybrid_engine.server.events import TextEvents, event
from hybrid_engine.server.logprobs import chat_logprobs, prompt_logprobs
from hybrid_engine.server.parsing.base import Event, Parser, Reasoning, Text, ToolCall
from hybrid_engine.server.protocol import ChatBody
from hybrid_engine.server.usage import Usage


@dataclass
class Choice:
    """One answer so far."""

    parser: Parser
    has_begun: bool = False
    content: str = ""
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    texts: dict[type[Text | Reasoning], TextEvents] = field(default_factory=dict)
    """Write what goes on and is text only."""


class ChatWriter:
    """Writes one request's answers."""

    def __init__(self, body: ChatBody, completion_id: str, model: str, *, make_parser: Callable[[], Parser]) -> None:
        """make_parser: makes what reads one answer."""
        self.usage = Usage()
        self.model = model
        self._body = body
        self._make_parser = make_parser
        self._head = {"id": completion_id, "created": int(time.time()), "model": model}
        options = body.stream_options
        self._has_usage_chunk = options is not None and bool(options.include_usage)
        self._has_continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._has_texts_only = not (self._has_continuous_usage or body.return_token_ids or body.logprobs)
        """Whether nothing but the text tells one chunk from the next, until an answer ends or calls a tool."""
        self._choices: dict[int, Choice] = {}
        self._first: RequestOutput | None = None

    def add(self, delta: RequestOutput) -> None:
        """Take what is new, to be written whole later."""
        self.usage.add(delta)
        self._first = self._first or delta
        for output in delta.outputs:
            self.read(output)

    def whole(self) -> dict[str, Any]:
        """Return the whole answer."""
        choices = [self._whole_choice(index, choice) for index, choice in sorted(self._choices.items())]
        return (
            {"object": "chat.completion"}
            | self._head
            | {"choices": choices, "usage": self._usage()}
            | self._prompt_part(self._first)
        )

    def events(self, delta: RequestOutput) -> bytes:
        """Return what is new as events of a stream."""
        self.usage.add(delta)
        prompt_part = self._prompt_part(delta) if self._first is None else {}
        self._first = self._first or delta
        pieces = []
        for output in delta.outputs:
            choice, events = self.read(output)
            texts = [each for each in events if not isinstance(each, ToolCall)]
            goes_on = choice.has_begun and output.finish_reason is None
            if self._has_texts_only and goes_on and len(texts) == len(events):
                pieces += [self._text_event(choice, output.index, each) for each in texts]
                continue
            for written in self._chunk_choices(choice, output, events):
                pieces.append(event(self._chunk([written]) | prompt_part))
                prompt_part = {}
        return b"".join(pieces)

    def last_event(self) -> bytes:
        """Return the event that has the usage and no text, where it is wanted."""
        return event(self._chunk([]) | {"usage": self._usage()}) if self._has_usage_chunk else b""

    @property
    def first_token_ids(self) -> list[int]:
        """Those of the first answer so far."""
        return self._choices[0].token_ids if 0 in self._choices else []

    def _text_event(self, choice: Choice, index: int, text: Text | Reasoning) -> bytes:
        kind = type(text)
        if kind not in choice.texts:
            choice.texts[kind] = TextEvents(self._chunk([_written(index, _delta(kind(TextEvents.MARK)))]))
        return choice.texts[kind].event(text.text)

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = {"object": "chat.completion.chunk"} | self._head | {"choices": choices}
        if self._has_continuous_usage:
            chunk["usage"] = self._usage()
        elif self._has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return self.usage.body(explains=bool(self._body.explain_cache))

    def _prompt_part(self, output: RequestOutput | None) -> dict[str, Any]:
        part: dict[str, Any] = {}
        if output is not None and self._body.return_token_ids:
            part["prompt_token_ids"] = output.prompt_token_ids
        if output is not None and self._body.prompt_logprobs is not None:
            part["prompt_logprobs"] = prompt_logprobs(output.prompt_logprobs)
        return part

    def read(self, output: CompletionOutput) -> tuple[Choice, list[Event]]:
        """Take in what is new of one answer; return it and the events of that."""
        choice = self._choices.setdefault(output.index, Choice(self._make_parser()))
        if getattr(choice.parser, "is_inside", False):
            self.usage.num_reasoning_tokens += len(output.token_ids)
        events = choice.parser.add(output.text)
        if output.finish_reason is not None:
            events += choice.parser.finish()
        kept: list[Event] = []
        for found in events:
            if self._keep(choice, found):
                kept.append(found)
        if output.logprobs is not None:
            choice.logprobs += self._logprobs(output)["content"]
        choice.token_ids += output.token_ids
        if output.finish_reason is not None:
            has_called = choice.tool_calls and output.finish_reason == "stop"
            choice.finish_reason = "tool_calls" if has_called else output.finish_reason
            choice.stop_reason = output.stop_reason
        return choice, kept

    def _keep(self, choice: Choice, event: Event) -> bool:
        """Add an event to an answer; return False when the client wants none of it."""
        if isinstance(event, Text):
            choice.content += event.text
        elif isinstance(event, Reasoning):
            if self._body.include_reasoning is False:
                return False
            choice.reasoning += event.text
        else:
            if choice.tool_calls and self._body.parallel_tool_calls is False:
                return False
            choice.tool_calls.append(_call(event))
        return True

    def _logprobs(self, output: CompletionOutput) -> dict[str, Any]:
        return chat_logprobs(
            output.token_ids,
            output.logprobs or [],
            num_top=self._body.top_logprobs or 0,
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
        )

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message |= {"content": choice.content or None, "tool_calls": choice.tool_calls}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        found: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": {"content": choice.logprobs, "refusal": None} if self._body.logprobs else None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._body.return_token_ids:
            found["token_ids"] = choice.token_ids
        return found

    def _chunk_choices(self, choice: Choice, output: CompletionOutput, events: Sequence[Event]) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = []
        has_role, choice.has_begun = not choice.has_begun, True
        if has_role:
            deltas.append({"role": "assistant", "content": ""})
        num_calls = len(choice.tool_calls) - sum(isinstance(each, ToolCall) for each in events)
        for each in events:
            if isinstance(each, ToolCall):
                deltas.append({"tool_calls": [{"index": num_calls} | choice.tool_calls[num_calls]]})
                num_calls += 1
            else:
                deltas.append(_delta(each))
        extras: dict[str, Any] = {"logprobs": self._logprobs(output) if output.logprobs is not None else None}
        if self._body.return_token_ids:
            extras["token_ids"] = output.token_ids
        if output.finish_reason is not None or (not deltas and any(extras.values())):
            deltas.append({})
        chunks = [_written(output.index, delta) for delta in deltas]
        if chunks:
            # What comes with tokens comes once, with the first chunk of them.
            chunks[1 if has_role and len(chunks) > 1 else 0] |= extras
        if output.finish_reason is not None:
            chunks[-1] |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        return chunks


def _written(index: int, delta: dict[str, Any]) -> dict[str, Any]:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}


def _delta(event: Text | Reasoning) -> dict[str, Any]:
    return {"content" if isinstance(event, Text) else "reasoning_content": event.text}


def _call(event: ToolCall) -> dict[str, Any]:
    return {
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": event.name, "arguments": event.arguments},
    }
