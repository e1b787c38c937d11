"""The forms in which a caller may give prompts, brought into one."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybrid_engine.errors import RequestError
from hybrid_engine.sampling_params import SamplingParams

PromptLike = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a dict with 'prompt' or 'prompt_token_ids' (both: the ids run, the text is reported) and, if
wanted, 'cache_salt', 'message_boundaries' (the tokens after which a message ends) and 'priority' (the lower, the
sooner, where the scheduling policy is 'priority')."""

PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt", "message_boundaries", "priority")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request as a caller states it."""

    request_id: str
    prompt: str | Sequence[int]
    """Text, or token ids that are taken as they are."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    cache_salt: str = ""
    """A prefix cached under one salt is never found under another."""
    text: str | None = None
    """What to report as the prompt's text when it comes as token ids."""
    message_boundaries: Sequence[int] = ()
    """Tokens of the prompt after which a message ends: recurrent layers leave a state there for later turns."""
    priority: int = 0
    """The lower, the sooner, where the scheduling policy is 'priority'."""


@dataclass(frozen=True, slots=True)
class PromptInput:
    """One prompt."""

    content: str | Sequence[int]
    """What runs: text to tokenise, or token ids as they are."""
    text: str | None
    """What is reported as the prompt's text."""
    cache_salt: str = ""
    message_boundaries: Sequence[int] = ()
    """Tokens after which a message ends."""
    priority: int = 0
    """The lower, the sooner."""


def as_token_ids(token_ids: Sequence[int]) -> list[int]:
    """Return token ids as integers. Raises RequestError for what is none."""
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError as error:
        raise RequestError(f"prompt_token_ids must be integers: {error}") from error


def check_text(name: str, text: str) -> None:
    """Raise RequestError for what is no valid text, such as half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is no valid text: {error}") from error


def as_prompts(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptInput]:
    """Return a list of prompts, whether one or many were given; a list of integers is one prompt.

    Raises RequestError that names the first one it can't read.
    """
    if isinstance(prompts, str | bytes | bytearray | Mapping) or _is_token_ids(prompts):
        return [_as_prompt(prompts)]
    found = []
    for index, prompt in enumerate(_items(prompts)):
        try:
            found.append(_as_prompt(prompt))
        except RequestError as error:
            raise RequestError(f"prompt {index}: {error}") from error
    return found


def as_sampling(sampling: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    """Return sampling parameters for each prompt. Raises RequestError for others, too few or too many."""
    if sampling is None or isinstance(sampling, SamplingParams):
        return [sampling or SamplingParams()] * num_prompts
    if not isinstance(sampling, Sequence) or not all(isinstance(each, SamplingParams) for each in sampling):
        raise RequestError(
            f"sampling_params is {sampling!r:.60}, must be a SamplingParams, a list of one for each prompt, or None"
        )
    if len(sampling) != num_prompts:
        raise RequestError(
            f"{len(sampling)} sampling parameters for {num_prompts} prompts: give one for all or one for each"
        )
    return list(sampling)


def as_conversations(messages: Any) -> list[list[Mapping[str, Any]]]:
    """Return a list of conversations, whether one or many were given. Raises RequestError for anything else."""
    messages = list(_items(messages))
    conversations = [messages] if all(isinstance(message, Mapping) for message in messages) else messages
    for index, conversation in enumerate(conversations):
        if not is_conversation(conversation):
            raise RequestError(
                f"conversation {index} is {conversation!r:.60}, must be a list of messages like "
                f"{{'role': 'user', 'content': '…'}}"
            )
        if not conversation:
            raise RequestError(f"conversation {index} has no messages: give at least one")
    return conversations


def is_conversation(value: Any) -> bool:
    """Return whether this is a list of messages."""
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return is_list and all(isinstance(message, Mapping) for message in value)


def _as_prompt(prompt: Any) -> PromptInput:
    if isinstance(prompt, str):
        return PromptInput(prompt, prompt)
    if isinstance(prompt, Mapping):
        return _from_mapping(prompt)
    if isinstance(prompt, bytes | bytearray):
        raise RequestError(f"it is {prompt!r:.60}, must be text: decode the bytes first")
    if not _is_token_ids(prompt):
        raise RequestError(f"it is {prompt!r:.60}, must be text, token ids, or a dict with one of them")
    return PromptInput(prompt, None)


def _from_mapping(prompt: Mapping[str, Any]) -> PromptInput:
    unknown = sorted(set(prompt) - set(PROMPT_KEYS))
    if unknown:
        raise RequestError(f"unknown key {unknown[0]!r}, allowed are {', '.join(PROMPT_KEYS)}")
    token_ids, text = prompt.get("prompt_token_ids"), prompt.get("prompt")
    content = text if token_ids is None else token_ids
    if content is None:
        raise RequestError("the dict has neither 'prompt' nor 'prompt_token_ids', must have one of them")
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt is {text!r:.60}, must be text; token ids go into 'prompt_token_ids'")
    if token_ids is not None and not _is_sequence(token_ids):
        raise RequestError(f"prompt_token_ids is {token_ids!r:.60}, must be a list of token ids")
    salt, boundaries = prompt.get("cache_salt") or "", prompt.get("message_boundaries") or ()
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt is {salt!r:.60}, must be text")
    if not _is_sequence(boundaries) or not all(isinstance(boundary, numbers.Integral) for boundary in boundaries):
        raise RequestError(f"message_boundaries is {boundaries!r:.60}, must be numbers of tokens")
    priority = prompt.get("priority") or 0
    if not isinstance(priority, numbers.Integral) or isinstance(priority, bool):
        raise RequestError(f"priority is {priority!r:.60}, must be an integer (the lower, the sooner)")
    return PromptInput(content, text, salt, boundaries, int(priority))


def _is_token_ids(value: Any) -> bool:
    """Whether this is one prompt as token ids; an empty list is not: it is no prompts at all."""
    return _is_sequence(value) and len(value) > 0 and _is_integer(value[0])


def _is_integer(value: Any) -> bool:
    """Whether this is a number without fraction: also an element of an array or of a tensor, of whatever library."""
    try:
        operator.index(value)
    except (TypeError, ValueError):  # a row of a tensor, a float
        return False
    return True


def _is_sequence(value: Any) -> bool:
    """Whether this can be token ids: a list, an array, not a text nor bytes."""
    if isinstance(value, str | bytes | bytearray | Mapping) or not hasattr(value, "__getitem__"):
        return False
    try:
        len(value)
    except TypeError:  # a tensor or an array that is one number has a length only by name
        return False
    return True


def _items(values: Any) -> Iterator[Any]:
    try:
        return iter(values)
    except TypeError as error:
        raise RequestError(f"got {values!r:.60}, must be a prompt or a list of them") from error
