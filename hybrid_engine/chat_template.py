"""From a conversation to a prompt: the checkpoint's chat template, and where its messages end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_engine.errors import ChatTemplateError, ConfigError
from hybrid_engine.message_boundaries import TEMPLATE_ERRORS, MessageEnds, token_positions

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """Renders conversations for one tokenizer; remembers where messages ended in those that go on."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: str | None = None) -> None:
        """template: used instead of the tokenizer's own."""
        self._tokenizer = tokenizer
        self._template = template
        self._message_ends = MessageEnds()

    @property
    def text(self) -> str:
        """The template in use; '' where there is none."""
        return _as_text(self._template or self._tokenizer.chat_template)

    def render(
        self,
        messages: Messages,
        *,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Render a conversation to a prompt that `LLM.generate` takes: text, token ids, where messages end.

        chat_template: used this once. tools: JSON schemas of functions that the model may call.
        continue_final_message: the answer goes on with the last message instead of beginning a new one.
        variables: what else the template may look at.
        Raises ChatTemplateError when there is no template, or it refuses the messages.
        """
        template = chat_template or self._template
        turns: list[dict[str, Any]] = [dict(message) for message in messages]
        own_tools: list[Any] | None = None if tools is None else [dict(tool) for tool in tools]
        if template is None and self._tokenizer.chat_template is None:
            raise ChatTemplateError(
                "this checkpoint has no chat template: pass one as chat_template= (--chat-template on the command "
                "line), or use generate if the model isn't trained to chat"
            )

        def render(count: int, invites: bool = False, continues: bool = False) -> str:
            text = self._tokenizer.apply_chat_template(
                turns[:count],
                tools=own_tools,
                chat_template=template,
                add_generation_prompt=invites,
                continue_final_message=continues,
                tokenize=False,
                **dict(variables or {}),
            )
            assert isinstance(text, str), f"the template gave a {type(text).__name__}"
            return text

        try:
            text = render(len(turns), add_generation_prompt, continue_final_message)
            text.encode()
        except TEMPLATE_ERRORS as error:  # a text that is no valid one among them
            raise ChatTemplateError(f"the chat template refused the messages: {error}") from error
        # The template writes the begin-of-text token itself.
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
        rest = repr((template or self._tokenizer.chat_template, own_tools, variables))
        ends = self._message_ends.find(render, turns, text, template=rest)
        boundaries = token_positions(ends, encoded["offset_mapping"])
        return {"prompt": text, "prompt_token_ids": encoded["input_ids"], "message_boundaries": boundaries}


def _as_text(template: Any) -> str:
    """Return a template, or all of those that a tokenizer has by name."""
    return template if isinstance(template, str) else "\n".join(map(str, (template or {}).values()))


def read_template(path: Path) -> str:
    """Read a template from a file. Raises ConfigError where that can't be done."""
    if not path.is_file():
        raise ConfigError(f"chat_template is {path}, which is no file: give a template or the path of one")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template is {path}, which can't be read as UTF-8 text: {error}") from error
