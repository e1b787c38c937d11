"""Where messages end in a rendered conversation: later turns often part from it there.

Agents strip reasoning and edit tool results, so that the end of the last answer alone rarely matches again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from itertools import pairwise
from typing import Any, NamedTuple

import jinja2

from hybrid_engine.recent import RecentDict

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What a template raises for messages that it wasn't made for: content parts given to one that adds texts, say."""


class MessageEnds:
    """Finds where messages end in a rendered conversation, and remembers it for the turns that come later.

    A message ends where the conversation up to it, rendered alone, ends, if the whole text begins with that. Only
    rendering tells, and each message takes a rendering of all before it; of what was rendered in an earlier turn, the
    length and a digest are remembered, so that a turn renders as often as it brings new messages. What is remembered
    is compared with the text like any rendering, and rendered again where it differs: the answer is always exact.
    """

    def __init__(self, *, max_remembered: int = 16_384) -> None:
        self._remembered: RecentDict[bytes, _Rendering] = RecentDict(max_remembered)

    def find(
        self, render: Callable[[int], str], messages: Sequence[Mapping[str, Any]], text: str, *, template: str = ""
    ) -> list[int]:
        """Return the character positions in text at which its messages end, ascending.

        render: the text of the first so many messages alone, without an invitation to answer. A template that renders
        a shorter conversation differently (or refuses it) has no such position for it. template: whatever else decides
        what `render` gives.
        """
        prefixes, ends = _Prefixes(text), []
        for count, key in enumerate(_keys(messages, template), start=1):
            known = self._remembered.get(key) if key is not None else None
            if known is None or not prefixes.begins_with(known):
                known = self._render(render, count, key)
            if known is not None and prefixes.begins_with(known):
                ends.append(known.length)
        return [end for before, end in pairwise([0, *ends]) if end > before]

    def _render(self, render: Callable[[int], str], count: int, key: bytes | None) -> _Rendering | None:
        try:
            prefix = render(count)
        except TEMPLATE_ERRORS:
            return None  # it finds so short a conversation incomplete
        rendering = _Rendering(len(prefix), _digest(prefix))
        if key is not None:
            self._remembered[key] = rendering
        return rendering


class _Rendering(NamedTuple):
    """The beginning of a conversation, rendered."""

    length: int
    """In characters."""
    digest: bytes


class _Prefixes:
    """The prefixes of a text, asked for in any order; ascending ones cost one pass over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._hashed = blake2b(digest_size=_DIGEST_BYTES)
        self._length = 0

    def begins_with(self, rendering: _Rendering) -> bool:
        """Return whether the text begins with what was rendered."""
        length = rendering.length
        if length > len(self._text):
            return False
        if length < self._length:
            return _digest(self._text[:length]) == rendering.digest
        self._hashed.update(_encoded(self._text[self._length : length]))
        self._length = length
        return self._hashed.digest() == rendering.digest


_DIGEST_BYTES = 16


def _digest(text: str) -> bytes:
    return blake2b(_encoded(text), digest_size=_DIGEST_BYTES).digest()


def _encoded(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _keys(messages: Sequence[Mapping[str, Any]], template: str) -> Iterator[bytes | None]:
    """Name the conversation up to each message; None from the first message on that holds more than plain values."""
    digest = blake2b(_encoded(template), digest_size=_DIGEST_BYTES)
    is_plain = True
    for message in messages:
        is_plain = is_plain and _is_plain(message)
        if is_plain:
            # The repr of plain values tells their types and the order of keys: a template may see either.
            part = _encoded(repr(message))
            digest.update(len(part).to_bytes(8, "little") + part)
        yield digest.digest() if is_plain else None


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind is dict:
        return all(map(_is_plain, value.keys())) and all(map(_is_plain, value.values()))
    if kind is list or kind is tuple:
        return all(map(_is_plain, value))
    return value is None or kind in (str, int, float, bool)


def token_positions(char_ends: Sequence[int], offsets: Sequence[tuple[int, int]]) -> list[int]:
    """Return, for each character position, how many tokens lie wholly before it, ascending and each once.

    offsets: each token's start and end in the text, ascending.
    """
    positions: list[int] = []
    num_tokens = 0
    for char_end in char_ends:
        while num_tokens < len(offsets) and offsets[num_tokens][1] <= char_end:
            num_tokens += 1
        if num_tokens and (not positions or num_tokens > positions[-1]):
            positions.append(num_tokens)
    return positions
