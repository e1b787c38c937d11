"""Sends requests to a server and notes when what came back."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    import httpx2

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Ask:
    """One request."""

    path: str
    body: Mapping[str, Any]


@dataclass(slots=True)
class Answer:
    """What came back, and when; times in seconds of one clock."""

    start: float
    news: list[float] = field(default_factory=list)
    """When something of the text came: one or several tokens."""
    end: float = 0.0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_answer_tokens: int = 0
    error: str | None = None
    """Why there is no whole answer."""

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return self.news[0] - self.start

    @property
    def e2el(self) -> float:
        """Seconds to the end."""
        return self.end - self.start

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first, on average; 0 for one token."""
        return (self.news[-1] - self.news[0]) / max(self.num_answer_tokens - 1, 1)

    @property
    def itls(self) -> list[float]:
        """Seconds between news."""
        return [after - before for before, after in zip(self.news, self.news[1:], strict=False)]


class Server:
    """A server that is measured."""

    def __init__(self, http: httpx2.AsyncClient, model: str) -> None:
        """http: knows the address and the key. model: what the server calls it."""
        self.model = model
        self._http = http

    async def ask(self, ask: Ask) -> Answer:
        """Send a request and read its stream. What goes wrong is noted in the answer, not raised."""
        import httpx2

        body = {**ask.body, "model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer(time.perf_counter())
        try:
            async with self._http.stream("POST", ask.path, json=body) as response:
                if response.status_code != 200:
                    text = (await response.aread()).decode(errors="replace")
                    answer.error = f"status {response.status_code}: {text:.200}"
                else:
                    async for chunk in _chunks(response):
                        _note(answer, chunk)
        except httpx2.HTTPError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.end = time.perf_counter()
        if answer.error is None and not answer.news:
            answer.error = "the stream had no text"
        answer.num_answer_tokens = answer.num_answer_tokens or len(answer.news)
        return answer


async def find_model(http: httpx2.AsyncClient) -> str:
    """Return the first model that a server has. Raises ConfigError when there is no such server."""
    import httpx2

    try:
        response = await http.get("/v1/models")
        return str(response.raise_for_status().json()["data"][0]["id"])
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{http.base_url} doesn't tell its models ({error}): is a server there? Or name one"
        ) from error


async def _chunks(response: httpx2.Response) -> AsyncIterator[Any]:
    """Iterate over the events of a stream, each of which is JSON."""
    async for line in response.aiter_lines():
        if line.startswith("data:") and (text := line[5:].strip()) != "[DONE]":
            yield json.loads(text)


def _note(answer: Answer, chunk: Any) -> None:
    if "error" in chunk:
        answer.error = f"in the stream: {chunk['error']!r:.200}"
    if any(_has_news(choice) for choice in chunk.get("choices") or ()):
        answer.news.append(time.perf_counter())
    usage = chunk.get("usage")
    if usage:
        answer.num_prompt_tokens = usage["prompt_tokens"]
        answer.num_answer_tokens = usage["completion_tokens"]
        answer.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _has_news(choice: Mapping[str, Any]) -> bool:
    delta = choice.get("delta") or {}
    written = ("content", "reasoning_content", "reasoning", "tool_calls")
    return bool(choice.get("text")) or any(delta.get(name) for name in written)
