"""From a sample to the tokens that the model reads: with a chat template or without, and one begin-of-text token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hybrid_engine.errors import ChatTemplateError, ConfigError
from hybrid_engine.llm import LLM

if TYPE_CHECKING:
    from hybrid_engine.evals.samples import Sample

FORMATS = ("auto", "completion", "chat", "chat-system")
"""completion: document and question as they are. chat: both as one message. chat-system: the document as the system
message, the question as the user's. auto: chat where the checkpoint has a template, else completion."""


class BeginOfTextError(ConfigError):
    """A prompt has no begin-of-text token, or several, where the model wants exactly one."""


class Prompts:
    """Renders samples for one model."""

    def __init__(self, llm: LLM, prompt_format: str = "auto") -> None:
        """Raises ConfigError for a format that doesn't exist."""
        if prompt_format not in FORMATS:
            raise ConfigError(f"prompt_format is {prompt_format!r}, must be one of {', '.join(FORMATS)}")
        self._llm = llm
        self.tokenizer = llm.get_tokenizer()
        if prompt_format == "auto":
            prompt_format = "chat" if _has_chat_template(llm) else "completion"
        self.format = prompt_format
        self.bos_token_id = self.tokenizer.bos_token_id
        self.begins_with_bos = self.tokenizer("a")["input_ids"][:1] == [self.bos_token_id]

    def render(self, sample: Sample) -> list[int]:
        """Return a sample's prompt. Raises BeginOfTextError unless it has one such token, where the model has any."""
        token_ids = list(sample.token_ids) or self._encode(sample)
        self.check_bos(token_ids)
        return token_ids

    def _encode(self, sample: Sample) -> list[int]:
        if self.format == "completion":
            text = sample.document + sample.question + sample.cue + sample.answer_prefix
            return self.encode(text)
        if self.format == "chat":
            messages = [{"role": "user", "content": sample.document + sample.question}]
        else:
            messages = [
                {"role": "system", "content": sample.document},
                {"role": "user", "content": sample.question.strip()},
            ]
        text = self._llm.apply_chat_template(messages)["prompt"] + sample.answer_prefix
        # The template writes the begin-of-text token itself.
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return a text's tokens."""
        # Not verbose: a tokenizer warns of texts longer than the length that it thinks the model has.
        return self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"]

    def check_bos(self, token_ids: list[int]) -> None:
        """Raise BeginOfTextError for a prompt that lacks the model's begin-of-text token or has it twice."""
        bos = self.bos_token_id
        if bos is None:
            return
        num_first = next((i for i, token_id in enumerate(token_ids) if token_id != bos), len(token_ids))
        # Where one token begins and ends texts it may stand in a conversation too.
        num_all = num_first if bos == self.tokenizer.eos_token_id else token_ids.count(bos)
        if num_first > 1 or num_all > 1 or (self.begins_with_bos and num_first == 0):
            raise BeginOfTextError(
                f"a prompt in the format {self.format!r} begins with {num_first} and has {num_all} begin-of-text "
                f"tokens ({self.tokenizer.bos_token!r}), must have exactly one, in front: check the chat template"
            )


def _has_chat_template(llm: LLM) -> bool:
    try:
        llm.apply_chat_template([{"role": "user", "content": "a"}])
    except ChatTemplateError:
        return False
    return True
