"""/v1/responses: the same conversations in another form. Nothing is stored."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hybrid_engine.outputs import RequestOutput
from hybrid_engine.server.api_errors import ApiError, JsonResponse
from hybrid_engine.server.chat import Chat, OpenChat
from hybrid_engine.server.events import EventStream, while_connected
from hybrid_engine.server.protocol import Body, ChatBody, ResponsesBody, ResponseToolChoice
from hybrid_engine.server.response_items import Items, named_event

STARTS = ("response.created", "response.in_progress")
SAME_NAMES = (
    "model",
    "temperature",
    "top_p",
    "parallel_tool_calls",
    "stream",
    "cache_salt",
    "priority",
    "service_tier",
    "timeout_seconds",
    "explain_cache",
    "seed",
)


async def respond(chat: Chat, body: ResponsesBody, request: Request, tenant: str | None) -> Response:
    """Answer a request for a response, at once or as a stream."""
    response_id = f"resp_{uuid.uuid4().hex}"
    opened = await chat.open(as_chat(body), tenant, response_id)
    writer = _Writer(body, response_id, opened)
    if body.stream:
        return EventStream(opened.answering, writer, ends_with_done=False)
    await while_connected(request.receive, opened.answering, writer.collect)
    return JsonResponse(writer.whole())


def as_chat(body: ResponsesBody) -> ChatBody:
    """Return the same request as one for a chat completion. Raises ApiError for input of an unknown kind."""
    given = {name: getattr(body, name) for name in SAME_NAMES} | {"max_completion_tokens": body.max_output_tokens}
    given["messages"] = _messages(body)
    if body.tools:
        given["tools"] = [
            {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
            for tool in body.tools
        ]
    choice = body.tool_choice
    if isinstance(choice, ResponseToolChoice):
        given["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
    else:
        given["tool_choice"] = choice
    form = None if body.text is None else body.text.format
    if form is not None:
        schema = {"name": form.name or "answer", "schema": form.schema_}
        given["response_format"] = {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})
    if body.reasoning is not None:
        given["reasoning_effort"] = body.reasoning.effort
    return ChatBody.model_validate(given)


def _messages(body: ResponsesBody) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    if not items:
        raise ApiError(400, "input is empty: give at least one message", code="invalid_value", param="input")
    for index, item in enumerate(items):
        _add_item(messages, item, f"input[{index}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        # Calls stand behind the text that they came with, and together with each other.
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":  # templates write reasoning of earlier turns rarely, and never in this form
        raise ApiError(
            400,
            f"{where}.type is {kind!r:.60}, must be message, function_call, function_call_output or reasoning",
            code="invalid_value",
            param=f"{where}.type",
        )


class _Writer:
    """Writes one response, whole or as events."""

    def __init__(self, body: ResponsesBody, response_id: str, opened: OpenChat) -> None:
        self._body = body
        self._opened = opened
        self._items = Items()
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time())}
        self._finish_reason: str | None = None
        self._num_written = 0

    async def collect(self) -> None:
        """Read all of the answer."""
        while ready := await self._opened.answering.read():
            self.write(ready)
        self.end()

    def whole(self) -> dict[str, Any]:
        """Return the whole response."""
        is_cut = self._finish_reason == "length"
        return self._response("incomplete" if is_cut else "completed") | {
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": self._usage(),
        }

    def begin(self) -> bytes:
        """Return the first events."""
        started = self._response("in_progress") | {"incomplete_details": None, "usage": None}
        return self._events([{"type": kind, "response": started} for kind in STARTS])

    def write(self, ready: Sequence[RequestOutput]) -> bytes:
        """Return what is new as events."""
        writer, events = self._opened.writer, []
        for delta in ready:
            writer.usage.add(delta)
            for output in delta.outputs:
                choice, found = writer.read(output)
                self._finish_reason = choice.finish_reason
                events += [each for event in found for each in self._items.add(event)]
        return self._events(events)

    def end(self) -> bytes:
        """Return the last events, the whole response in the last of them."""
        self._opened.remember(self._opened.writer.first_token_ids)
        events = self._items.close()
        whole = self.whole()
        return self._events([*events, {"type": f"response.{whole['status']}", "response": whole}])

    def _events(self, events: Sequence[dict[str, Any]]) -> bytes:
        first = self._num_written
        self._num_written += len(events)
        return b"".join([named_event(each | {"sequence_number": n}) for n, each in enumerate(events, start=first)])

    def _response(self, status: str) -> dict[str, Any]:
        body = self._body
        return self._head | {
            "status": status,
            "model": self._opened.writer.model,
            "output": self._items.output,
            "error": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata or {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "temperature": body.temperature,
            "top_p": body.top_p,
            "text": {"format": {"type": "text"}} | _given(body.text),
            "tool_choice": body.tool_choice
            if isinstance(body.tool_choice, str)
            else _given(body.tool_choice) or "auto",
            "tools": [tool.model_dump(exclude_none=True) for tool in body.tools or ()],
            "truncation": "disabled",
            "store": False,
        }

    def _usage(self) -> dict[str, Any]:
        usage = self._opened.writer.usage.body(explains=bool(self._body.explain_cache))
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }


def _given(body: Body | None) -> dict[str, Any]:
    return {} if body is None else body.model_dump(by_alias=True, exclude_none=True)
