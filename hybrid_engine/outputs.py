"""What a caller gets back. The names and meanings are vLLM's, plus `cache`: what was found, and why not more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from hybrid_engine.step_plan import TokenLogprobs

if TYPE_CHECKING:
    from hybrid_engine.explanation import CacheExplanation


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    decoded_token: str
    """The token's text on its own."""


PositionLogprobs = dict[int, Logprob]
"""By token id: the chosen token first, then the likeliest ones, best first."""


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to a request, in seconds since the epoch; None: not yet."""

    arrival_time: float
    first_token_time: float | None = None
    finish_time: float | None = None
    num_preemptions: int = 0
    num_draft_tokens: int = 0
    """Tokens guessed ahead and verified, over all answers."""
    num_accepted_tokens: int = 0
    """Those of them that were right."""

    @property
    def ttft_seconds(self) -> float | None:
        """Seconds from arrival to the first token; None before it."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time

    @property
    def total_seconds(self) -> float | None:
        """Seconds from arrival to the end; None before it."""
        return None if self.finish_time is None else self.finish_time - self.arrival_time


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. In a delta, text, token_ids and logprobs are those that are new."""

    index: int
    """Which of the request's n answers this is."""
    text: str
    token_ids: list[int]
    """All tokens sampled, the one that ended the answer included, even where its text is not part of `text`."""
    cumulative_logprob: float | None = None
    """Sum over all tokens so far, also in a delta; None unless logprobs were asked for."""
    logprobs: list[PositionLogprobs] | None = None
    """One for each of token_ids."""
    finish_reason: str | None = None
    """'stop', 'length' or 'abort'; 'error' for a structured output whose grammar grew too complex to go on, which the
    log explains; None while the answer goes on."""
    stop_reason: int | str | None = None
    """The token id or the string that ended it; None for the model's own end-of-text token, for a structured output
    that is complete, and for 'length'."""

    @property
    def is_finished(self) -> bool:
        """Whether no more of this answer comes."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answers to one prompt, or in a delta the part of them that is new."""

    request_id: str
    prompt: str | None
    """None when the prompt came as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    """Of the first answer to the prompt; finish_time is the last answer's."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    """One for each prompt token, None for the first; in a stream it comes with the last delta."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; with n > 1 those of the first answer's request."""
    cache: CacheExplanation | None = None
    """Where each prompt token came from, and why not more of them were found; None before the prompt was scheduled.

    With n > 1 this is the first answer's: what the prompt found when it came. Its siblings hit what that one computed.
    """


def decode_logprobs(position: TokenLogprobs, decode: Callable[[int], str]) -> PositionLogprobs:
    """Turn what the sampler reports into what a caller reads. decode: the text of one token on its own."""
    ranked = [(position.token_id, position.logprob, position.rank)]
    ranked += [(token_id, logprob, rank) for rank, (token_id, logprob) in enumerate(position.top, start=1)]
    found: PositionLogprobs = {}
    for token_id, logprob, rank in ranked:
        if token_id not in found:
            found[token_id] = Logprob(logprob, rank, decode(token_id))
    return found


@dataclass(slots=True)
class _Answer:
    """One answer, put together from its deltas."""

    last: CompletionOutput
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)

    def add(self, delta: CompletionOutput) -> None:
        self.last = delta
        self.texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []

    def output(self) -> CompletionOutput:
        logprobs = None if self.last.logprobs is None else self.logprobs
        return replace(self.last, text="".join(self.texts), token_ids=self.token_ids, logprobs=logprobs)


class OutputCollector:
    """Puts the deltas of one request together again."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._answers: dict[int, _Answer] = {}

    def add(self, delta: RequestOutput) -> None:
        """Take the next delta of the request."""
        self._last = delta
        for output in delta.outputs:
            self._answers.setdefault(output.index, _Answer(output)).add(output)

    def output(self) -> RequestOutput:
        """Return everything so far as one RequestOutput, the answers by index. At least one delta must have come."""
        assert self._last is not None, "no delta was added"
        return replace(self._last, outputs=[self._answers[index].output() for index in sorted(self._answers)])
