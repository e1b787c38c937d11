"""All token sequences seen so far, so that the longest prefix of a new one that is among them can be told exactly."""

from __future__ import annotations

import numpy as np

Tokens = np.ndarray
"""int64, one dimension."""


class _Node:
    """The tokens on the way from the parent, and where they go on, by the next token."""

    __slots__ = ("children", "tokens")

    def __init__(self, tokens: Tokens, children: dict[int, _Node]) -> None:
        self.tokens = tokens
        self.children = children


class PrefixTree:
    """A radix tree (Morrison 1968, "PATRICIA") over token ids; what sequences share is kept once.

    Matching is exact to the token: no blocks, no hashes, nothing is ever given up. A cache can't hit more of a prompt
    than this finds, whatever it is made of.
    """

    def __init__(self) -> None:
        self._root = _Node(np.empty(0, np.int64), {})
        self.num_tokens = 0
        """Tokens kept: the sum over all sequences, shared beginnings counted once."""

    def longest_prefix(self, tokens: Tokens) -> int:
        """Return how many of the first tokens begin a sequence that was added."""
        _, _, length = self._walk(tokens)
        return length

    def add(self, tokens: Tokens) -> int:
        """Keep a sequence; return how many of its first tokens were known before."""
        node, num_matched, length = self._walk(tokens)
        if length == len(tokens):
            return length
        if num_matched < len(node.tokens):
            _split(node, num_matched)
        # A copy, so that the tree doesn't keep the shared part of each sequence alive.
        node.children[int(tokens[length])] = _Node(tokens[length:].copy(), {})
        self.num_tokens += len(tokens) - length
        return length

    def _walk(self, tokens: Tokens) -> tuple[_Node, int, int]:
        """Return the last node that matches, how many of its own tokens do, and how many tokens do in all."""
        node, num_matched, length = self._root, 0, 0
        while length < len(tokens) and num_matched == len(node.tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            node, num_matched = child, _common_length(child.tokens, tokens[length:])
            length += num_matched
        return node, num_matched, length


def _split(node: _Node, num_tokens: int) -> None:
    """Put what follows the first num_tokens of a node into a child of its own."""
    rest = _Node(node.tokens[num_tokens:], node.children)
    node.children = {int(rest.tokens[0]): rest}
    node.tokens = node.tokens[:num_tokens]


def _common_length(left: Tokens, right: Tokens) -> int:
    shorter = min(len(left), len(right))
    differs = left[:shorter] != right[:shorter]
    first = int(differs.argmax()) if shorter else 0
    return first if shorter and differs[first] else shorter
