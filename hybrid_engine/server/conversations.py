"""Whether a chat's prompt begins with what its last turn left: where it doesn't, no cache can help.

Templates that strip reasoning, clients that shorten tool results or put a date first: all of them change the past.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)

MAX_REMEMBERED_BYTES = 16 * 2**20
"""Of all conversations, some 4 million tokens; the least recently used ones are forgotten first."""
_ENTRY_BYTES = 400
"""What an entry takes besides its tokens: an array's header, a tuple, a name and its place."""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a prompt parts from what the same conversation's last turn left."""

    at_token: int
    num_past_tokens: int
    where: str
    """'prompt': among what was sent before; 'answer': in the answer to it, as it came back."""
    num_messages: int
    """Messages that the last turn had, all of them sent again unchanged."""

    def body(self) -> dict[str, Any]:
        """Return what a client is told."""
        return {"at_token": self.at_token, "past_tokens": self.num_past_tokens, "where": self.where}


class ConversationLog:
    """Remembers what conversations left behind."""

    def __init__(self, max_bytes: int = MAX_REMEMBERED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._past: OrderedDict[bytes, tuple[np.ndarray, int]] = OrderedDict()

    def check(self, names: Sequence[bytes], token_ids: Sequence[int]) -> Divergence | None:
        """Compare a prompt with the longest beginning of its conversation that was answered before.

        names: those of the conversation's beginnings, by number of messages from one on; see `names_of`.
        """
        for num_messages in range(len(names) - 1, 0, -1):
            past = self._past.get(names[num_messages - 1])
            if past is not None:
                self._past.move_to_end(names[num_messages - 1])
                return _compare(*past, np.asarray(token_ids, np.int32), num_messages)
        return None

    def remember(self, name: bytes, token_ids: Sequence[int], *, answer_start: int) -> None:
        """Keep a prompt and its answer. answer_start: where the last message of the prompt ends."""
        self._forget(name)
        past = np.asarray(token_ids, np.int32)
        self._past[name] = past, answer_start
        self._num_bytes += past.nbytes + _ENTRY_BYTES
        while self._num_bytes > self._max_bytes:
            self._forget(next(iter(self._past)))

    def _forget(self, name: bytes) -> None:
        past = self._past.pop(name, None)
        if past is not None:
            self._num_bytes -= past[0].nbytes + _ENTRY_BYTES


def names_of(salt: str, messages: Sequence[Mapping[str, Any]], rest: Any) -> list[bytes]:
    """Return a name for each beginning of a conversation, by number of messages. rest: what else the prompt shows."""
    digest = hashlib.blake2b(json.dumps([salt, rest], sort_keys=True, default=str).encode(), digest_size=16)
    names = []
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True, default=str).encode())
        names.append(digest.digest())
    return names


def log_divergence(found: Divergence) -> None:
    """Say where, without any text."""
    logger.info(
        "a conversation's prompt parts from what its turn of %d messages left at token %d of %d, in the %s",
        *(found.num_messages, found.at_token, found.num_past_tokens, found.where),
    )


def _compare(past: np.ndarray, answer_start: int, now: np.ndarray, num_messages: int) -> Divergence | None:
    num = min(len(past), len(now))
    differing = np.flatnonzero(past[:num] != now[:num])
    at = int(differing[0]) if len(differing) else num
    if at >= len(past) - 1:  # the answer's last token, an end-of-text token, may be written in another way
        return None
    return Divergence(at, len(past), "answer" if at >= answer_start else "prompt", num_messages)
