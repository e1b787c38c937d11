"""/v1/completions: prompts in, texts out."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from hybrid_engine.engine import Prompt
from hybrid_engine.outputs import CompletionOutput, OutputCollector, RequestOutput
from hybrid_engine.server.api_errors import ApiError, JsonResponse
from hybrid_engine.server.events import EventStream, TextEvents, event, while_connected
from hybrid_engine.server.logprobs import completion_logprobs, prompt_logprobs
from hybrid_engine.server.protocol import CompletionBody
from hybrid_engine.server.sampling import sampling_params
from hybrid_engine.server.service import Answering, Service
from hybrid_engine.server.usage import Usage

DEFAULT_MAX_TOKENS = 16
MAX_LOGPROBS = 100


async def complete(service: Service, body: CompletionBody, request: Request, tenant: str | None) -> Response:
    """Answer a request for completions, at once or as a stream."""
    model = service.check_model(body.model)
    _check(body)
    writer = Writer(body, f"cmpl-{uuid.uuid4().hex}", model)
    prompts = await _prompts(service, body, writer, tenant)
    if writer.echoes and body.logprobs is not None:
        writer.first_texts = {
            prompt.request_id: await service.text.decode([int(prompt.prompt[0])]) for prompt in prompts
        }
    answering = await service.submit(prompts, timeout_seconds=body.timeout_seconds)
    if body.stream:
        return EventStream(answering, writer)
    outputs = await while_connected(request.receive, answering, lambda: _collect(answering))
    return JsonResponse(writer.whole(outputs))


def _check(body: CompletionBody) -> None:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ApiError(
            400,
            f"best_of is {body.best_of}, must be n ({body.n or 1}) or left out: all answers are returned",
            code="invalid_value",
            param="best_of",
        )
    if body.max_tokens == 0 and not (body.echo or body.prompt_logprobs is not None):
        raise ApiError(
            400,
            "max_tokens is 0, must be at least 1: only with echo or prompt_logprobs is there anything to return",
            code="invalid_value",
            param="max_tokens",
        )
    if body.logprobs is not None and body.logprobs > MAX_LOGPROBS:
        raise ApiError(
            400, f"logprobs is {body.logprobs}, must be at most {MAX_LOGPROBS}", code="invalid_value", param="logprobs"
        )


async def _prompts(service: Service, body: CompletionBody, writer: Writer, tenant: str | None) -> list[Prompt]:
    contents = _contents(body.prompt)
    if not 1 <= len(contents) <= service.settings.max_prompts:
        raise ApiError(
            400,
            f"prompt has {len(contents)} prompts, must be 1 to {service.settings.max_prompts}",
            code="invalid_value",
            param="prompt",
        )
    changes: dict[str, Any] = {}
    if writer.echoes and body.logprobs is not None:
        changes["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(body.max_tokens, 1)
    sampling = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, **changes)
    salt, priority = service.salt(tenant, body.cache_salt), service.priority(body.priority, body.service_tier)
    prompts = []
    for index, content in enumerate(contents):
        text, token_ids = await _read_prompt(service, body, content)
        prompts.append(
            Prompt(writer.request_id(index), token_ids, sampling, cache_salt=salt, text=text, priority=priority)
        )
    return prompts


async def _read_prompt(
    service: Service, body: CompletionBody, content: str | list[int]
) -> tuple[str | None, list[int]]:
    """Return a prompt's text, where it is needed or known, and its tokens."""
    if isinstance(content, str):
        if not content:
            raise ApiError(400, "prompt is empty: give some text", code="invalid_value", param="prompt")
        return content, await service.text.encode(content, add_special_tokens=body.add_special_tokens is not False)
    service.check_token_ids("prompt", content)
    return (await service.text.decode(content) if body.echo else None), content


def _contents(prompt: str | list[Any]) -> Sequence[str | list[int]]:
    """Return one or many prompts as many; a list of integers is one."""
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if prompt and isinstance(prompt[0], int) else prompt


async def _collect(answering: Answering) -> list[RequestOutput]:
    collectors: dict[str, OutputCollector] = {}
    while ready := await answering.read():
        for delta in ready:
            collectors.setdefault(delta.request_id, OutputCollector()).add(delta)
    return [collector.output() for collector in collectors.values()]


@dataclass
class _Choice:
    """How far one answer is written."""

    text_offset: int = 0
    has_begun: bool = False
    texts: TextEvents | None = None
    """Writes what goes on and is text only."""


class Writer:
    """Writes one request's answers, whole or in chunks."""

    def __init__(self, body: CompletionBody, completion_id: str, model: str) -> None:
        self.usage = Usage()
        self.echoes = bool(body.echo)
        self.first_texts: dict[str, str] = {}
        """By request id, the text of the prompt's first token; where the prompt's log-probabilities are echoed."""
        self._body = body
        self._n = body.n or 1
        self._has_answer = body.max_tokens != 0
        self._head = {"id": completion_id, "object": "text_completion", "created": int(time.time()), "model": model}
        options = body.stream_options
        self._has_usage_chunk = options is not None and bool(options.include_usage)
        self._has_continuous_usage = options is not None and bool(options.continuous_usage_stats)
        self._has_texts_only = not (
            self._has_continuous_usage or body.return_token_ids or body.logprobs is not None or not self._has_answer
        )
        """Whether nothing but the text tells one chunk from the next, from an answer's second to its last but one."""
        self._choices: dict[tuple[str, int], _Choice] = {}
        """By request and answer."""

    def request_id(self, index: int) -> str:
        """Return the engine's id for prompt `index`."""
        return f"{self._head['id']}-{index}"

    def whole(self, outputs: Sequence[RequestOutput]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for output in outputs:
            self.usage.add(output)
            choices += self._write(output)
        choices.sort(key=lambda choice: choice["index"])
        return self._head | {"choices": choices, "usage": self._usage()}

    def begin(self) -> bytes:
        """Return nothing: a stream begins with the first text."""
        return b""

    def write(self, ready: Sequence[RequestOutput]) -> bytes:
        """Return what is new as events of a stream."""
        return b"".join([self._event(delta) for delta in ready])

    def end(self) -> bytes:
        """Return the event that has the usage and no text, where it is wanted."""
        return event(self._head | {"choices": [], "usage": self._usage()}) if self._has_usage_chunk else b""

    def _event(self, delta: RequestOutput) -> bytes:
        self.usage.add(delta)
        texts = self._texts(delta)
        if texts is not None:
            return texts.event(delta.outputs[0].text)
        return event(self._chunk(self._write(delta)))

    def _texts(self, delta: RequestOutput) -> TextEvents | None:
        """Return what writes a delta of which only the text is news; None for others."""
        if len(delta.outputs) != 1 or delta.outputs[0].finish_reason is not None or not self._has_texts_only:
            return None
        output = delta.outputs[0]
        state = self._choices.get((delta.request_id, output.index))
        if state is None:
            return None
        if state.texts is None:
            marked = replace(output, text=TextEvents.MARK)
            state.texts = TextEvents(self._chunk(self._write(replace(delta, outputs=[marked]))))
        return state.texts

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        chunk = self._head | {"choices": choices}
        if self._has_continuous_usage:
            chunk["usage"] = self._usage()
        elif self._has_usage_chunk:
            chunk["usage"] = None
        return chunk

    def _usage(self) -> dict[str, Any]:
        return self.usage.body(explains=bool(self._body.explain_cache), has_answer=self._has_answer)

    def _write(self, delta: RequestOutput) -> list[dict[str, Any]]:
        return [self._choice(delta, output) for output in delta.outputs]

    def _index(self, delta: RequestOutput, output: CompletionOutput) -> int:
        """Return an answer's number among those to all prompts."""
        return int(delta.request_id.rpartition("-")[2]) * self._n + output.index

    def _choice(self, delta: RequestOutput, output: CompletionOutput) -> dict[str, Any]:
        state = self._choices.setdefault((delta.request_id, output.index), _Choice())
        is_first, state.has_begun = not state.has_begun, True
        has_prompt = self.echoes and is_first
        text = output.text if self._has_answer else ""
        choice: dict[str, Any] = {
            "index": self._index(delta, output),
            "text": (delta.prompt or "") + text if has_prompt else text,
            "logprobs": self._logprobs(delta, output, state, has_prompt=has_prompt),
            "finish_reason": output.finish_reason if self._has_answer else "length",
            "stop_reason": output.stop_reason if self._has_answer else None,
        }
        if self._body.return_token_ids:
            choice["token_ids"] = output.token_ids if self._has_answer else []
            if is_first:
                choice["prompt_token_ids"] = delta.prompt_token_ids
        if self._body.prompt_logprobs is not None and is_first:
            choice["prompt_logprobs"] = prompt_logprobs(delta.prompt_logprobs)
        return choice

    def _logprobs(
        self, delta: RequestOutput, output: CompletionOutput, state: _Choice, *, has_prompt: bool
    ) -> dict[str, Any] | None:
        if output.logprobs is None:
            return None
        token_ids = list(output.token_ids) if self._has_answer else []
        positions: list[Any] = list(output.logprobs) if self._has_answer else []
        if has_prompt and delta.prompt_logprobs is not None:
            token_ids, positions = delta.prompt_token_ids + token_ids, delta.prompt_logprobs + positions
        found = completion_logprobs(
            token_ids,
            positions,
            text_offset=state.text_offset,
            first_text=self.first_texts.get(delta.request_id, ""),
            as_token_ids=bool(self._body.return_tokens_as_token_ids),
        )
        if found["tokens"]:
            state.text_offset = found["text_offset"][-1] + len(found["tokens"][-1])
        return found
