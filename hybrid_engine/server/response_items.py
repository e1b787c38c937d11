"""The items of a response: messages, reasoning and calls, and the events in which they come."""

from __future__ import annotations

import uuid
from typing import Any

from hybrid_engine.server.api_errors import to_json
from hybrid_engine.server.parsing.base import Event, Text, ToolCall


def named_event(event: dict[str, Any]) -> bytes:
    """Return a server-sent event that has its type as a name too."""
    return b"event: " + event["type"].encode() + b"\ndata: " + to_json(event) + b"\n\n"


class Items:
    """Builds the output of a response; one item is open at a time."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None

    def add(self, event: Event) -> list[dict[str, Any]]:
        """Take what is new; return the events that tell of it."""
        if isinstance(event, ToolCall):
            return [*self.close(), *self._call(event)]
        kind = "message" if isinstance(event, Text) else "reasoning"
        events = []
        if self._open is None or self._open["type"] != kind:
            events += [*self.close(), *self._begin(kind)]
        assert self._open is not None
        part = self._open["content"][0]
        part["text"] += event.text
        name = "output_text" if isinstance(event, Text) else "reasoning_text"
        delta = self._event(f"response.{name}.delta") | {"content_index": 0, "delta": event.text}
        return [*events, delta | ({"logprobs": []} if isinstance(event, Text) else {})]

    def close(self) -> list[dict[str, Any]]:
        """End the open item, if there is one; return the events that tell of it."""
        item, self._open = self._open, None
        if item is None:
            return []
        item["status"] = "completed"
        part = item["content"][0]
        name = part["type"]
        done = self._event(f"response.{name}.done", item) | {"content_index": 0, "text": part["text"]}
        return [
            done | ({"logprobs": []} if name == "output_text" else {}),
            self._event("response.content_part.done", item) | {"content_index": 0, "part": part},
            self._item_event("response.output_item.done", item),
        ]

    def _begin(self, kind: str) -> list[dict[str, Any]]:
        item: dict[str, Any] = {"id": f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}", "type": kind}
        item |= {"status": "in_progress"}
        if kind == "message":
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item |= {"role": "assistant"}
        else:
            part = {"type": "reasoning_text", "text": ""}
            item |= {"summary": []}
        self.output.append(item)
        self._open = item
        added = self._item_event("response.output_item.added", item | {"content": []})
        item["content"] = [part]
        return [added, self._event("response.content_part.added") | {"content_index": 0, "part": dict(part)}]

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        item = {
            "id": f"fc_{uuid.uuid4().hex}",
            "type": "function_call",
            "status": "completed",
            "call_id": f"call_{uuid.uuid4().hex[:24]}",
            "name": call.name,
            "arguments": call.arguments,
        }
        self.output.append(item)
        return [
            self._item_event("response.output_item.added", item | {"arguments": "", "status": "in_progress"}),
            self._event("response.function_call_arguments.delta", item) | {"delta": call.arguments},
            self._event("response.function_call_arguments.done", item)
            | {"arguments": call.arguments, "name": call.name},
            self._item_event("response.output_item.done", item),
        ]

    def _event(self, kind: str, item: dict[str, Any] | None = None) -> dict[str, Any]:
        item = item or self._open
        assert item is not None, "no item is open"
        return {"type": kind, "item_id": item["id"], "output_index": len(self.output) - 1}

    def _item_event(self, kind: str, item: dict[str, Any]) -> dict[str, Any]:
        return {"type": kind, "output_index": len(self.output) - 1, "item": item}
