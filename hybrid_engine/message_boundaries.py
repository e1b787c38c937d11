"""Where messages end in a rendered conversation: later turns often part from it there.

Agents strip reasoning and edit tool results, so that the end of the last answer alone rarely matches again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import jinja2

TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError)
"""What a template raises for messages that it wasn't made for: content parts given to one that adds texts, say."""


def message_ends(render: Callable[[int], str], num_messages: int, text: str) -> list[int]:
    """Return the character positions in text at which its messages end, ascending.

    render: the text of the first so many messages alone, without an invitation to answer. A template that renders a
    shorter conversation differently (or refuses it) has no such position for it.
    """
    ends = []
    for count in range(1, num_messages + 1):
        try:
            prefix = render(count)
        except TEMPLATE_ERRORS:
            continue  # it finds so short a conversation incomplete
        if text.startswith(prefix):
            ends.append(len(prefix))
    return [end for before, end in pairwise([0, *ends]) if end > before]


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
