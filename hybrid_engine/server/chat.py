"""/v1/chat/completions: from a conversation to the next message."""

from __future__ import annotations

import inspect
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from transformers import PreTrainedTokenizerBase

from hybrid_engine.engine import Prompt
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import StructuredOutputsParams
from hybrid_engine.server.api_errors import ApiError, JsonResponse
from hybrid_engine.server.chat_writer import ChatWriter
from hybrid_engine.server.conversations import ConversationLog, log_divergence, names_of
from hybrid_engine.server.events import EventStream, while_connected
from hybrid_engine.server.messages import as_template_messages
from hybrid_engine.server.parsing.base import Parser
from hybrid_engine.server.parsing.families import Family
from hybrid_engine.server.protocol import ChatBody, FunctionDefinition, NamedTool
from hybrid_engine.server.sampling import sampling_params, structured_outputs
from hybrid_engine.server.service import Answering, Service

MAX_TOP_LOGPROBS = 20
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters)
"""What a request's chat_template_kwargs must not set."""


@dataclass(frozen=True)
class OpenChat:
    """A conversation whose answer is on its way."""

    answering: Answering
    writer: ChatWriter
    remember: Callable[[Sequence[int]], None]
    """Is told the first answer's tokens when all have been read."""

    async def collect(self) -> None:
        """Read all of it into the writer."""
        while ready := await self.answering.read():
            for delta in ready:
                self.writer.add(delta)
        self.remember(self.writer.first_token_ids)

    def begin(self) -> bytes:
        """Return nothing: a stream begins with the first text."""
        return b""

    def write(self, ready: Sequence[RequestOutput]) -> bytes:
        """Return what is new as events of a stream."""
        return b"".join([self.writer.events(delta) for delta in ready])

    def end(self) -> bytes:
        """Return the last events."""
        self.remember(self.writer.first_token_ids)
        return self.writer.last_event()


class Chat:
    """Answers conversations."""

    def __init__(self, service: Service, family: Family) -> None:
        self._service = service
        self._family = family
        self._conversations = ConversationLog()

    async def answer(self, body: ChatBody, request: Request, tenant: str | None) -> Response:
        """Answer a request for a chat completion, at once or as a stream."""
        opened = await self.open(body, tenant, f"chatcmpl-{uuid.uuid4().hex}")
        if body.stream:
            return EventStream(opened.answering, opened)
        await while_connected(request.receive, opened.answering, opened.collect)
        return JsonResponse(opened.writer.whole())

    async def open(self, body: ChatBody, tenant: str | None, request_id: str) -> OpenChat:
        """Submit a conversation; whoever gets it must see to its answering being closed."""
        service = self._service
        model = service.check_model(body.model)
        _check(body)
        functions = self._functions(body)
        salt = service.salt(tenant, body.cache_salt)
        rendered = await self.render(body)
        sampling, is_structured = self._sampling(body, functions, rendered["prompt"])
        prompt = Prompt(
            request_id,
            rendered["prompt_token_ids"],
            sampling,
            cache_salt=salt,
            text=rendered["prompt"],
            message_boundaries=rendered["message_boundaries"],
            priority=service.priority(body.priority, body.service_tier),
        )
        schemas = {function.name: function.parameters or {} for function in functions} if functions else None

        def make_parser() -> Parser:
            return self._family.parser(rendered["prompt"], schemas=schemas, is_structured=is_structured)

        answering = await service.submit([prompt], timeout_seconds=body.timeout_seconds)
        writer = ChatWriter(body, request_id, model, make_parser=make_parser)
        names = names_of(salt, body.messages, body.model_dump(include={"tools", "chat_template_kwargs"}))
        writer.usage.divergence = self._look_back(names, prompt)
        return OpenChat(answering, writer, partial(self._remember, names[-1], prompt))

    async def render(self, body: Any) -> dict[str, Any]:
        """Render the conversation of a body that has messages; see ChatTemplate."""
        tools = getattr(body, "tools", None)
        return await self._service.text.render(
            as_template_messages(body.messages),
            tools=[tool.model_dump(exclude_none=True) for tool in tools] if tools else None,
            add_generation_prompt=_adds_generation_prompt(body),
            continue_final_message=bool(body.continue_final_message),
            variables=_template_variables(body),
        )

    def _functions(self, body: ChatBody) -> list[FunctionDefinition]:
        """Return the functions whose calls are to be told apart; none where there are none, or 'none' is chosen."""
        functions = [tool.function for tool in body.tools or ()]
        choice = body.tool_choice or ("auto" if functions else "none")
        if choice == "none":
            return []
        if not functions:
            raise _wrong("tool_choice", f"tool_choice is {_choice_name(choice)!r} and there are no tools: give some")
        if not self._family.has_tools:
            raise _wrong(
                "tools",
                "how this model writes tool calls isn't known: start the server with --tool-parser, or send "
                "tool_choice 'none'",
            )
        if isinstance(choice, NamedTool):
            functions = [function for function in functions if function.name == choice.function.name]
            if not functions:
                raise _wrong("tool_choice", f"tool_choice names {choice.function.name!r}, which is none of the tools")
        return functions

    def _sampling(self, body: ChatBody, functions: list[FunctionDefinition], prompt: str) -> tuple[Any, bool]:
        """Return the sampling parameters, and whether the answer must match something from its first token on."""
        enforced: StructuredOutputsParams | None = None
        if functions and (body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)):
            enforced = self._enforced_call(body, functions, prompt)
        has_tools = bool(functions)
        changes: dict[str, Any] = {}
        if self._family.keeps_special_tokens(has_tools=has_tools):
            changes["skip_special_tokens"] = False
        if stops := self._family.stops(has_tools=has_tools):
            own = [body.stop] if isinstance(body.stop, str) else body.stop or []
            changes["stop"] = (*own, *stops)
        max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        sampling = sampling_params(body, max_tokens=max_tokens, logprobs=logprobs, structured=enforced, **changes)
        return sampling, enforced is None and sampling.structured_outputs is not None

    def _enforced_call(
        self, body: ChatBody, functions: list[FunctionDefinition], prompt: str
    ) -> StructuredOutputsParams:
        if structured_outputs(body) is not None:
            raise _wrong("tool_choice", "a tool call and a response format are both enforced: an answer is one of them")
        enforced = self._family.enforced_call(functions, prompt)
        if enforced is None:
            raise _wrong(
                "tool_choice",
                f"tool_choice is {_choice_name(body.tool_choice)!r}, which can't be enforced in the form of "
                f"{self._family.tools!r}: use 'auto'",
            )
        return enforced

    def _look_back(self, names: Sequence[bytes], prompt: Prompt) -> Any:
        found = self._conversations.check(names, [*prompt.prompt])
        if found is not None:
            log_divergence(found)
            self._service.metrics.note_diverged(found.where)
        return found

    def _remember(self, name: bytes, prompt: Prompt, answer_ids: Sequence[int]) -> None:
        start = prompt.message_boundaries[-1] if prompt.message_boundaries else len(prompt.prompt)
        self._conversations.remember(name, [*prompt.prompt, *answer_ids], answer_start=start)


def _check(body: ChatBody) -> None:
    if body.top_logprobs is not None and not body.logprobs:
        raise _wrong("top_logprobs", "top_logprobs is given and logprobs is not true: set both")
    if (body.top_logprobs or 0) > MAX_TOP_LOGPROBS:
        raise _wrong("top_logprobs", f"top_logprobs is {body.top_logprobs}, must be at most {MAX_TOP_LOGPROBS}")
    both = (body.max_tokens, body.max_completion_tokens)
    if None not in both and both[0] != both[1]:
        raise _wrong("max_tokens", f"max_tokens is {both[0]} and max_completion_tokens {both[1]}: give one of them")
    if body.continue_final_message and body.add_generation_prompt:
        raise _wrong(
            "continue_final_message", "continue_final_message and add_generation_prompt are both set: choose one"
        )


def _adds_generation_prompt(body: Any) -> bool:
    wanted = body.add_generation_prompt
    return not body.continue_final_message if wanted is None else wanted


def _template_variables(body: Any) -> Mapping[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    wrong = sorted(RESERVED & set(variables))
    if wrong:
        raise _wrong("chat_template_kwargs", f"chat_template_kwargs has {wrong[0]!r}, which is no template's variable")
    effort = getattr(body, "reasoning_effort", None)
    return variables if effort is None else {"reasoning_effort": effort} | variables


def _choice_name(choice: Any) -> str:
    return choice.function.name if isinstance(choice, NamedTool) else str(choice)


def _wrong(param: str, message: str) -> ApiError:
    return ApiError(400, message, code="invalid_value", param=param)
