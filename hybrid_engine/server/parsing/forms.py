"""Calls that are not written in JSON: Qwen's XML and Gemma's own."""

from __future__ import annotations

import json
import re
from typing import Any

from hybrid_engine.server.parsing.base import ToolCall
from hybrid_engine.server.parsing.tools import Schemas, read_json

FUNCTION = re.compile(r"<function=([^>\s]+)>(.*?)(?:</function>|\Z)", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\s]+)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
ESCAPE = "<escape>"


def read_json_or_xml(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read calls in JSON, as Hermes and Qwen 2 and 3 write them, or in XML, as Qwen 3 Coder does."""
    return read_json(body, schemas) or read_xml(body, schemas)


def read_xml(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read `<function=name><parameter=key>value</parameter></function>`; what is to be a text is taken as it is."""
    calls = []
    for name, inner in FUNCTION.findall(body):
        properties = schemas.get(name, {}).get("properties", {})
        arguments = {key: _typed(value, properties.get(key)) for key, value in PARAMETER.findall(inner)}
        calls.append(ToolCall(name, json.dumps(arguments, ensure_ascii=False)))
    return calls or None


def _typed(value: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(value, value)


def read_gemma(body: str, schemas: Schemas) -> list[ToolCall] | None:
    """Read `call:name{key:<escape>text<escape>,other:3}`."""
    match = re.fullmatch(r"\s*call:\s*([\w.\-]+)\s*(\{.*\})\s*", body, re.DOTALL)
    if match is None:
        return None
    try:
        arguments, end = _gemma_value(match[2], 0)
    except (ValueError, RecursionError):
        return None
    is_whole = isinstance(arguments, dict) and not match[2][end:].strip()
    return [ToolCall(match[1], json.dumps(arguments, ensure_ascii=False))] if is_whole else None


def _gemma_value(text: str, start: int) -> tuple[Any, int]:
    """Return the value that begins at start and where it ends. Raises ValueError."""
    start = _skip_space(text, start)
    if text.startswith(ESCAPE, start):
        end = text.index(ESCAPE, start + len(ESCAPE))
        return text[start + len(ESCAPE) : end], end + len(ESCAPE)
    if text.startswith("{", start):
        return _gemma_items(text, start + 1, "}")
    if text.startswith("[", start):
        return _gemma_items(text, start + 1, "]")
    match = re.compile(r"[^,}\]]+").match(text, start)
    if match is None:
        raise ValueError("a value is missing")
    return _typed(match[0].strip(), None), match.end()


def _gemma_items(text: str, start: int, closing: str) -> tuple[Any, int]:
    found: Any = {} if closing == "}" else []
    start = _skip_space(text, start)
    while not text.startswith(closing, start):
        if closing == "}":
            colon = text.index(":", start)
            key = text[start:colon].strip().removeprefix(ESCAPE).removesuffix(ESCAPE)
            found[key], start = _gemma_value(text, colon + 1)
        else:
            value, start = _gemma_value(text, start)
            found.append(value)
        start = _skip_space(text, start)
        if text.startswith(",", start):
            start = _skip_space(text, start + 1)
        elif not text.startswith(closing, start):
            raise ValueError("a comma is missing")
    return found, start + 1


def _skip_space(text: str, start: int) -> int:
    while start < len(text) and text[start].isspace():
        start += 1
    return start
