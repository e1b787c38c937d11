"""Tokenises and renders beside the loop, so that a long prompt holds up nobody."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from hybrid_engine.chat_template import ChatTemplate
from hybrid_engine.errors import RequestError

T = TypeVar("T")


class TextWorker:
    """One thread with a tokenizer of its own: a tokenizer must not be used by two threads at once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, chat_template: str | None = None) -> None:
        """tokenizer: is copied. chat_template: used instead of its own."""
        self._tokenizer = copy.deepcopy(tokenizer)
        self._template = ChatTemplate(self._tokenizer, chat_template)
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="hybrid-engine-text")

    @property
    def template_text(self) -> str:
        """The chat template in use; '' where there is none."""
        return self._template.text

    @property
    def special_tokens(self) -> frozenset[str]:
        """Tokens that a text leaves out unless it is asked to keep them."""
        added = self._tokenizer.added_tokens_decoder.values()
        return frozenset(token.content for token in added if token.special)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens. Raises RequestError for a text that is none."""
        return await self._run(lambda: self._encode(text, add_special_tokens))

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""
        return await self._run(lambda: str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False)))

    async def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return each token as the vocabulary has it."""
        return await self._run(lambda: list(self._tokenizer.convert_ids_to_tokens(list(token_ids))))

    async def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> dict[str, Any]:
        """Render a conversation; see ChatTemplate."""
        return await self._run(lambda: self._template.render(messages, **options))

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is no valid text: {error}") from error
        return self._tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
