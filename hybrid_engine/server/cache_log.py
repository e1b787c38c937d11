"""A log from which `hybrid-engine replay` tells what another cache would have hit: identities of tokens, no text.

The first line says what the cache is made of; every other one is an answer that ended:

    {"time": 1764460000.1, "ttft_s": 0.2, "total_s": 1.9, "input_tokens": 900, "output_tokens": 40,
     "hash_runs": [[0, 600], [4100, 340]], "ends": [600, 890], "hit": 592, "finish": "stop"}

A number stands for a token together with all before it: two requests have a number in common if and only if they have
that beginning in common, salt included. Numbers are handed out in the order in which beginnings come up, so that they
tell nothing but what was equal to what; `hash_runs` are (first number, how many ascending ones), prompt then answer.
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hybrid_engine.engine import Engine, Prompt
from hybrid_engine.errors import ConfigError
from hybrid_engine.outputs import CompletionOutput, RequestOutput

VERSION = 1
MAX_TOKENS = 2**26
"""Tokens remembered to tell what is equal, four bytes each and little more; then all are forgotten, and prompts look
new that are not. A cache large enough to have kept them is hardly ever there."""
_TOKEN_BYTES = 4


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return what a replay must know of an engine; to be called between two steps."""
    scheduler = engine.scheduler
    coordinator = scheduler.coordinator
    return {
        "layers": [
            {"kind": group.spec.kind, "layers": list(group.layer_indices), **asdict(group.spec)}
            for group in coordinator.groups
        ],
        "memory_bytes": coordinator.memory.layout.num_bytes,
        "block_size": coordinator.config.block_size,
        "checkpoint_interval": coordinator.config.checkpoint_interval,
        "eviction_policy": coordinator.config.eviction_policy,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": scheduler.config.max_num_seqs,
        "step_tokens": scheduler.config.max_num_scheduled_tokens,
    }


@dataclass
class _Answering:
    """What is known of a prompt while it is answered."""

    salt: str
    ends: Sequence[int]
    prompt: Sequence[int] = ()
    arrival_s: float = 0.0
    ttft_s: float | None = None
    hit: int | None = None
    answers: dict[int, list[int]] = field(default_factory=dict)
    """By index: the tokens so far of those that go on."""


class CacheLog:
    """Appends a line for each answer. Raises ConfigError when the file can't be written."""

    def __init__(self, path: Path, *, model: str, max_tokens: int = MAX_TOKENS) -> None:
        try:
            self._file: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"the cache log can't be written: {error}") from error
        self._model = model
        self._prefixes = PrefixNumbers(max_tokens)
        self._answering: dict[str, _Answering] = {}
        self.has_header = False
        """Whether it was said what the cache is made of."""

    def write_header(self, engine: Mapping[str, Any]) -> None:
        """Say what the cache is made of; engine: from `describe_engine`."""
        self.has_header = True
        self._write({"cache_log": VERSION, "time": time.time(), "model": self._model, **engine})

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Take in prompts that were accepted."""
        for prompt in prompts:
            self._answering[prompt.request_id] = _Answering(prompt.cache_salt, prompt.message_boundaries)

    def note(self, delta: RequestOutput) -> None:
        """Take in what is new of a prompt, and write a line for each of its answers that ends with it."""
        known = self._answering.get(delta.request_id)
        if known is None:
            return
        if not known.prompt:
            known.prompt, known.arrival_s = delta.prompt_token_ids, delta.metrics.arrival_time
            known.hit = None if delta.cache is None else delta.cache.hit
            first = delta.metrics.first_token_time
            known.ttft_s = None if first is None else first - known.arrival_s
        for output in delta.outputs:
            answer = known.answers.setdefault(output.index, [])
            answer += output.token_ids
            if output.finish_reason is not None:
                self._end(known, output)
        if delta.finished:
            del self._answering[delta.request_id]

    def abandon(self, request_ids: Sequence[str]) -> None:
        """Write what was answered of prompts that nobody waits for any more."""
        for request_id in request_ids:
            known = self._answering.pop(request_id, None)
            for index in list(known.answers) if known else ():
                assert known is not None
                self._end(known, CompletionOutput(index=index, text="", token_ids=[], finish_reason="abort"))

    def close(self) -> None:
        """Write nothing more."""
        self._file.close()

    def _end(self, known: _Answering, output: CompletionOutput) -> None:
        answer = known.answers.pop(output.index)
        self._write(
            {
                "time": round(known.arrival_s, 6),
                "ttft_s": None if known.ttft_s is None else round(known.ttft_s, 6),
                "total_s": round(time.time() - known.arrival_s, 6),
                "input_tokens": len(known.prompt),
                "output_tokens": len(answer),
                "hash_runs": self._prefixes.runs(known.salt, [*known.prompt, *answer]),
                "ends": list(known.ends),
                # What the prompt hit is known of its first answer; the others hit what that one computed.
                "hit": known.hit if output.index == 0 else None,
                "finish": output.finish_reason,
            }
        )

    def _write(self, values: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(values, separators=(",", ":")) + "\n")
        self._file.flush()


class _Node:
    """Tokens on the way from the parent, four bytes each; the first one's number, the others' follow it."""

    __slots__ = ("children", "first", "tokens")

    def __init__(self, tokens: bytes, first: int, children: dict[bytes, _Node]) -> None:
        self.tokens = tokens
        self.first = first
        self.children = children


class PrefixNumbers:
    """Numbers every beginning of every token sequence, equal ones alike: a radix tree for each salt."""

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens = max_tokens
        self._roots: dict[str, _Node] = {}
        self._num_kept = 0
        self._next = 0

    def runs(self, salt: str, token_ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return the numbers of a sequence's beginnings, one a token, as (first, how many ascending ones)."""
        if self._num_kept > self._max_tokens:
            self._roots.clear()
            self._num_kept = 0
        left = array("i", token_ids).tobytes()
        node = self._roots.setdefault(salt, _Node(b"", 0, {}))
        found: list[tuple[int, int]] = []
        while left:
            child = node.children.get(left[:_TOKEN_BYTES])
            if child is None:
                child = _Node(left, self._next, {})
                node.children[left[:_TOKEN_BYTES]] = child
                self._next += len(left) // _TOKEN_BYTES
                self._num_kept += len(left) // _TOKEN_BYTES
            length = _common_length(child.tokens, left)
            if length < len(child.tokens):
                _split(child, length)
            _add(found, child.first, length // _TOKEN_BYTES)
            left, node = left[length:], child
        return found


def _add(runs: list[tuple[int, int]], first: int, count: int) -> None:
    if runs and sum(runs[-1]) == first:
        runs[-1] = runs[-1][0], runs[-1][1] + count
    else:
        runs.append((first, count))


def _split(node: _Node, length: int) -> None:
    """Put what follows the first so many bytes of a node into a child of its own."""
    rest = _Node(node.tokens[length:], node.first + length // _TOKEN_BYTES, node.children)
    node.tokens = node.tokens[:length]
    node.children = {rest.tokens[:_TOKEN_BYTES]: rest}


def _common_length(left: bytes, right: bytes) -> int:
    """Return how many bytes of whole tokens two sequences begin with alike, by halving: comparing is fast."""
    low, high = 0, min(len(left), len(right)) // _TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * _TOKEN_BYTES, middle * _TOKEN_BYTES
        low, high = (middle, high) if left[start:end] == right[start:end] else (low, middle - 1)
    return low * _TOKEN_BYTES
