"""From a model call of a trace to token ids: what the prompt is, what the answer will be, where messages end."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hybrid_engine.bench.calls import BlockCall, Call, Message, MessageCall, TextCall
from hybrid_engine.bench.workload import BlockPrompt, TokenPrompt, WorkItem
from hybrid_engine.errors import ConfigError, TraceError
from hybrid_engine.message_boundaries import TEMPLATE_ERRORS, MessageEnds, token_positions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Encode = Callable[[str], Sequence[int]]

ANSWER_TOKEN_ID = 0
"""What answers are made of where a trace doesn't tell them: no prompt has it, so that no prompt goes on from them."""
_SCOPE_BITS = 44
"""Room for the tokens of one scope: the largest block id times the largest block, see traces.py."""
_EDIT_MARK = "(edited) "


@dataclass(frozen=True, slots=True)
class TokenCall:
    """A model call as token ids."""

    prompt_token_ids: list[int]
    answer_token_ids: Sequence[int]
    message_boundaries: Sequence[int] = ()
    """Tokens of the prompt after which a message ends."""


class Renderer:
    """Renders calls to tokens; the same message always gives the same ones.

    A message becomes `<|role|>`, its content, whatever else it holds as JSON, and `<|end|>`; a prompt ends with the
    head of the answer. Head, body and end are tokenised one by one, as the special tokens of chat templates part them.
    """

    def __init__(self, encode: Encode, *, replaces_assistant: bool = False) -> None:
        """replaces_assistant: prompts show another text than the assistant wrote, as when agents strip reasoning."""
        self._encode = lru_cache(maxsize=None)(lambda text: tuple(encode(text)))
        self._replaces_assistant = replaces_assistant
        self._messages: dict[tuple[str, str], tuple[int, ...]] = {}
        self._scopes: dict[str, int] = {}
        self._num_unmatched = 0

    def render(self, call: Call) -> TokenCall:
        """Return a call's tokens."""
        if isinstance(call, BlockCall):
            return self._render_blocks(call)
        item = self.item(call)
        if isinstance(call, TextCall):
            item = replace(item, answer=(ANSWER_TOKEN_ID,) * item.num_answer_tokens)
        assert isinstance(item.prompt, TokenPrompt)
        assert item.answer is not None
        return TokenCall(item.prompt.token_ids(), item.answer, item.message_boundaries)

    def item(self, call: Call) -> WorkItem:
        """Return a call as it is replayed: texts as tokens, in pieces that prompts share, blocks as they are."""
        when = {each.name: getattr(call.when, each.name) for each in fields(call.when)}
        if isinstance(call, BlockCall):
            prompt = BlockPrompt(
                call.num_prompt_tokens, call.block_runs, call.block_tokens, call.scope, call.names_answer
            )
            ends = call.message_boundaries
            return WorkItem(call.session, prompt, call.num_answer_tokens, message_boundaries=ends, **when)
        if isinstance(call, TextCall):
            return WorkItem(call.session, TokenPrompt((self._encode(call.text),)), call.num_answer_tokens, **when)
        pieces, answer, ends = self._pieces(call)
        return WorkItem(call.session, TokenPrompt(pieces), len(answer), answer, message_boundaries=ends, **when)

    def _pieces(self, call: MessageCall) -> tuple[tuple[Sequence[int], ...], Sequence[int], tuple[int, ...]]:
        """Return a prompt's tokens, message by message, those of the answer, and where the messages end."""
        pieces = [self._message(_edited(each) if self._replaces_assistant else each) for each in call.messages]
        ends = tuple(accumulate(map(len, pieces)))
        pieces.append(self._encode(_head(call.answer)))
        return tuple(pieces), self._encode(_body(call.answer)) + self._encode("<|end|>"), ends

    def _message(self, message: Message) -> tuple[int, ...]:
        head, body = _head(message), _body(message)
        if (head, body) not in self._messages:
            parts = (head, body, "<|end|>", "\n")
            self._messages[head, body] = tuple(token for part in parts for token in self._encode(part))
        return self._messages[head, body]

    def _render_blocks(self, call: BlockCall) -> TokenCall:
        """Give each block tokens of its own, and tokens that never come again to what the blocks don't cover."""
        scope = self._scopes.setdefault(call.scope, len(self._scopes)) << _SCOPE_BITS
        size = call.block_tokens
        runs = [np.arange(first * size, (first + count) * size) for first, count in call.block_runs]
        covered = np.concatenate([np.empty(0, np.int64), *runs])[: call.num_prompt_tokens]
        token_ids = (covered + (scope + ANSWER_TOKEN_ID + 1)).tolist()
        num_rest = call.num_prompt_tokens - len(token_ids)
        token_ids += range(-self._num_unmatched - 1, -self._num_unmatched - 1 - num_rest, -1)
        self._num_unmatched += num_rest
        return TokenCall(token_ids, [ANSWER_TOKEN_ID] * call.num_answer_tokens)


class TemplateRenderer(Renderer):
    """Renders messages with a chat template and tokenises each prompt as a whole, as `LLM.chat` does."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str, *, replaces_assistant: bool = False) -> None:
        super().__init__(_encode_with(tokenizer), replaces_assistant=replaces_assistant)
        self._tokenizer = tokenizer
        self._template = template
        self._ends = MessageEnds()

    def _pieces(self, call: MessageCall) -> tuple[tuple[Sequence[int], ...], Sequence[int], tuple[int, ...]]:
        messages = [dict(_edited(each) if self._replaces_assistant else each) for each in call.messages]
        try:
            prompt = self._text(messages, invites=True)
            whole = self._text([*messages, dict(call.answer)], invites=False)
        except TEMPLATE_ERRORS as error:
            raise TraceError(f"session {call.session}: the chat template refused the messages: {error}") from error
        if not prompt:
            raise TraceError(f"session {call.session}: the chat template gave an empty prompt")
        encoded = self._tokenizer(prompt, add_special_tokens=False, return_offsets_mapping=True)
        ends = self._ends.find(lambda count: self._text(messages[:count], invites=False), messages, prompt)
        boundaries = token_positions(ends, encoded["offset_mapping"])
        answer = whole[len(prompt) :] if whole.startswith(prompt) else _body(call.answer)
        # An answer is at least one token: the one that ends it.
        # Four bytes a token: a prompt tokenised as a whole shares nothing with others.
        pieces = (array("i", encoded["input_ids"]),)
        return pieces, self._encode(answer) or (ANSWER_TOKEN_ID,), tuple(boundaries)

    def _text(self, messages: list[dict[str, Any]], *, invites: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            messages, chat_template=self._template, add_generation_prompt=invites, tokenize=False
        )
        assert isinstance(text, str), f"the template gave a {type(text).__name__}"
        return text


def renderer_maker(
    tokenizer: Path | None, chat_template: Path | None, *, replaces_assistant: bool = False
) -> Callable[[], Renderer]:
    """Return what makes a new renderer for each replay.

    Raises ConfigError for a template without a tokenizer or one that can't be read, CheckpointError for no tokenizer.
    """
    if chat_template is None:
        encode = load_encoder(tokenizer)
        return lambda: Renderer(encode, replaces_assistant=replaces_assistant)
    if tokenizer is None:
        raise ConfigError("a chat template without a tokenizer: give the one that it was written for")
    try:
        template = chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {chat_template} can't be read as UTF-8 text: {error}") from error
    from hybrid_engine.tokenizer import load_tokenizer

    loaded = load_tokenizer(tokenizer)
    return lambda: TemplateRenderer(loaded, template, replaces_assistant=replaces_assistant)


def load_encoder(tokenizer: Path | None) -> Encode:
    """Return what turns text into token ids: a checkpoint's tokenizer (a folder or a .gguf file), None: its bytes.

    Raises CheckpointError when there is none.
    """
    if tokenizer is None:
        return lambda text: text.encode("utf-8", errors="surrogatepass")
    from hybrid_engine.tokenizer import load_tokenizer

    return _encode_with(load_tokenizer(tokenizer))


def _encode_with(tokenizer: PreTrainedTokenizerBase) -> Encode:
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"] if text else []


def _head(message: Message) -> str:
    return f"<|{message['role']}|>\n"


def _body(message: Message) -> str:
    content = message.get("content")
    text = content if isinstance(content, str) else "" if content is None else _json(content)
    rest = {name: value for name, value in message.items() if name not in ("role", "content") and value is not None}
    return text + ("\n" + _json(rest) if rest else "")


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _edited(message: Message) -> Message:
    """Return an assistant's message as an agent shows it that strips the beginning; others as they are."""
    if message["role"] != "assistant":
        return message
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    return {**message, "content": _EDIT_MARK + text[len(text) // 2 :]}
