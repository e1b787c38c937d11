"""Log-probabilities in the two forms of OpenAI's API and in vLLM's for prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hybrid_engine.outputs import Logprob, PositionLogprobs

LOWEST = -9999.0
"""Stands for minus infinity, which JSON has not."""


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None],
    *,
    text_offset: int,
    first_text: str = "",
    as_token_ids: bool = False,
) -> dict[str, Any]:
    """Return the lists of /v1/completions. text_offset: characters before the first of these tokens.

    A position of None is the prompt's first token: nothing is known of it but its text, first_text.
    """
    tokens: list[str] = []
    chosen: list[float | None] = []
    top: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for token_id, position in zip(token_ids, positions, strict=True):
        text = first_text if position is None else position[token_id].decoded_token
        text = f"token_id:{token_id}" if as_token_ids else text
        tokens.append(text)
        offsets.append(text_offset)
        text_offset += len(text)
        chosen.append(None if position is None else _finite(position[token_id]))
        top.append(None if position is None else _by_text(position, as_token_ids))
    return {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": top, "text_offset": offsets}


def chat_logprobs(
    token_ids: Sequence[int], positions: Sequence[PositionLogprobs], *, num_top: int, as_token_ids: bool = False
) -> dict[str, Any]:
    """Return the list of /v1/chat/completions."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        ranked = sorted(position.items(), key=lambda item: item[1].rank)
        top = [_entry(other_id, logprob, as_token_ids) for other_id, logprob in ranked if logprob.rank <= num_top]
        content.append(_entry(token_id, position[token_id], as_token_ids) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[dict[str, Any] | None] | None:
    """Return vLLM's list for prompts: by token id, what is known of each token but the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {"logprob": _finite(found), "rank": found.rank, "decoded_token": found.decoded_token}
            for token_id, found in position.items()
        }
        for position in positions
    ]


def _entry(token_id: int, logprob: Logprob, as_token_ids: bool) -> dict[str, Any]:
    text = logprob.decoded_token
    # A token that is only a part of a character has bytes that its text doesn't tell.
    token_bytes = None if "�" in text else list(text.encode("utf-8", "replace"))
    name = f"token_id:{token_id}" if as_token_ids else text
    return {"token": name, "logprob": _finite(logprob), "bytes": token_bytes}


def _by_text(position: PositionLogprobs, as_token_ids: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for token_id, logprob in position.items():
        # Of tokens with the same text (parts of characters have none) the first, which is the chosen one, stays.
        found.setdefault(f"token_id:{token_id}" if as_token_ids else logprob.decoded_token, _finite(logprob))
    return found


def _finite(logprob: Logprob) -> float:
    return max(logprob.logprob, LOWEST)
