"""Messages as clients send them, made into what chat templates read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from hybrid_engine.server.api_errors import ApiError

ROLES = ("system", "developer", "user", "assistant", "tool")


def as_template_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with texts for contents and dicts for the arguments of tool calls.

    A developer message is a system message: templates know no other name for it. All other keys go to the template as
    they are. Raises ApiError for a role or content that no template reads.
    """
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    found = dict(message) | {"role": "system" if role == "developer" else role}
    found["content"] = _content(message.get("content"), where)
    if found.get("tool_calls") is None:
        found.pop("tool_calls", None)
        if message.get("content") is None and role != "assistant":
            raise _wrong(f"{where}.content", None, "a text, or a list of parts of type 'text'")
    else:
        found["tool_calls"] = _tool_calls(found["tool_calls"], f"{where}.tool_calls")
    return found


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong(f"{where}.content", content, "a text, or a list of parts of type 'text'")
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise _wrong(f"{where}.content[{index}]", part, "a part of type 'text': this model reads nothing else")
        texts.append(text)
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise _wrong(where, calls, "a list of tool calls")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise _wrong(where, call, "an object with 'function', which has 'name' and 'arguments'")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        # What a model wrote wrong is printed by the template as it is.
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _wrong(name: str, value: Any, wanted: str) -> ApiError:
    return ApiError(400, f"{name} is {value!r:.60}, must be {wanted}", code="invalid_value", param=name)
