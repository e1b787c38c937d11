"""A conversation at the terminal, with a model of this process or with a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, Protocol

from rich.console import Console

from hybrid_engine.errors import ConfigError, RequestError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    import openai

Message = dict[str, str]


class Partner(Protocol):
    """Whoever answers."""

    facts: str
    """What there is to say about the last answer; '' when there is nothing."""

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """Answer a conversation, piece by piece; closing the iterator ends the answer. Raises RequestError."""


class ModelPartner:
    """A model that is loaded here."""

    def __init__(self, llm: LLM, sampling: SamplingParams) -> None:
        """Raises ChatTemplateError when the model has no chat template."""
        self.facts = ""
        self._llm = llm
        self._sampling = sampling
        llm.apply_chat_template([{"role": "user", "content": "hello"}])

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """Answer a conversation."""
        self.facts = ""
        with self._llm.stream(self._llm.apply_chat_template(messages), self._sampling) as stream:
            for delta in stream:
                self.facts = f"prompt: {delta.cache} tokens"
                yield delta.outputs[0].text


class ServerPartner:
    """A server with OpenAI's API, of whatever make."""

    def __init__(self, client: openai.OpenAI, *, model: str | None, options: Mapping[str, Any]) -> None:
        """model: as the server calls it; None: its first. options: of every request, such as max_tokens.

        Raises ConfigError when the server can't be reached.
        """
        import openai

        self.facts = ""
        self._client = client
        self._options = options
        try:
            self.model = model or next(iter(client.models.list())).id
        except (openai.OpenAIError, StopIteration) as error:
            raise ConfigError(f"{client.base_url} doesn't tell its models: {error}") from error

    def answer(self, messages: Sequence[Message]) -> Iterator[str]:
        """Answer a conversation."""
        import openai

        self.facts = ""
        create: Any = self._client.chat.completions.create
        try:
            stream = create(
                model=self.model,
                messages=messages,
                stream=True,
                stream_options={"include_usage": True},
                **self._options,
            )
            with stream:
                for chunk in stream:
                    if chunk.usage is not None:
                        self.facts = _facts(chunk.usage)
                    yield from (choice.delta.content or "" for choice in chunk.choices)
        except openai.OpenAIError as error:
            raise RequestError(f"the server refused: {error}") from error


def connect(url: str, api_key: str | None) -> openai.OpenAI:
    """Return OpenAI's client for a server. url: with or without /v1 at its end."""
    try:
        import openai
    except ImportError as error:
        raise ConfigError("chat --url needs openai: pip install 'hybrid-engine[client]'") from error
    base = url.rstrip("/").removesuffix("/v1")
    return openai.OpenAI(base_url=f"{base}/v1", api_key=api_key or "none", max_retries=0)


def server_options(sampling: SamplingParams) -> dict[str, Any]:
    """Return what a request tells a server of how to sample; what OpenAI doesn't know is its extra body."""
    options: dict[str, Any] = {name: getattr(sampling, name) for name in ("max_tokens", "temperature", "top_p")}
    if sampling.seed is not None:
        options["seed"] = sampling.seed
    extra: dict[str, Any] = {"top_k": sampling.top_k} if sampling.top_k else {}
    if (structured := sampling.structured_outputs) is not None:
        extra["structured_outputs"] = {structured.constraint: getattr(structured, structured.constraint)}
    return options | {"extra_body": extra}


def _facts(usage: Any) -> str:
    details = usage.prompt_tokens_details
    cached = (details.cached_tokens or 0) if details is not None else 0
    return f"prompt: {usage.prompt_tokens} tokens, {cached} of them cached; answer: {usage.completion_tokens}"


class ChatSession:
    """Reads what a person types, shows the answer as it comes, and keeps the conversation."""

    def __init__(self, partner: Partner, *, read: Callable[[str], str], system: str | None = None) -> None:
        """read: shows a prompt and returns a line; raises EOFError at the end."""
        self._partner = partner
        self._read = read
        self._system = system
        self._notes = Console(stderr=True)
        self.messages: list[Message] = []
        self._reset()

    def run(self) -> None:
        """Talk until /exit or the end of the input."""
        self._note("/reset begins anew, /exit ends, Ctrl-C cuts an answer short")
        while True:
            try:
                line = self._read("> ").strip()
            except (EOFError, KeyboardInterrupt):
                return
            if line == "/exit":
                return
            if line == "/reset":
                self._reset()
                self._note("the conversation begins anew")
            elif line:
                self._answer(line)

    def _reset(self) -> None:
        self.messages = [{"role": "system", "content": self._system}] if self._system else []

    def _answer(self, line: str) -> None:
        asked = [*self.messages, {"role": "user", "content": line}]
        text = ""
        pieces: Any = self._partner.answer(asked)
        with closing(pieces):
            try:
                for piece in pieces:
                    text += piece
                    print(piece, end="", flush=True)
            except KeyboardInterrupt:
                self._note(" (cut short)")
            except RequestError as error:
                self._note(f"{error} (/reset forgets the conversation)")
                return
        print()
        self.messages = [*asked, {"role": "assistant", "content": text}]
        if self._partner.facts:
            self._note(self._partner.facts)

    def _note(self, text: str) -> None:
        self._notes.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)
