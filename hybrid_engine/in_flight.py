"""What the engine knows of a caller's request while it runs: its prompt, its n answers, and what came of each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from hybrid_engine.detokenizer import Detokenizer
from hybrid_engine.outputs import (
    CompletionOutput,
    PositionLogprobs,
    RequestMetrics,
    RequestOutput,
    decode_logprobs,
)
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import TokenLogprobs

DecodeToken = Callable[[int], str]


@dataclass(slots=True)
class CallerRequest:
    """One prompt as a caller sent it; its n answers are scheduler requests of their own."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str
    arrival_time: float
    message_boundaries: tuple[int, ...] = ()
    priority: int = 0
    seed: int = 0
    answers: list[Answer] = field(default_factory=list)
    """Those handed to the scheduler so far: one, then its siblings."""
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    first_token_time: float | None = None
    finish_time: float | None = None

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(self.prompt_token_ids)

    @property
    def answer_ids(self) -> list[str]:
        """The scheduler's ids for the answers, also of those not yet handed to it."""
        if self.sampling.n == 1:
            return [self.request_id]
        return [f"{self.request_id}#{index}" for index in range(self.sampling.n)]

    @property
    def is_finished(self) -> bool:
        """Whether all n answers have ended."""
        return len(self.answers) == self.sampling.n and all(answer.is_finished for answer in self.answers)

    def answer_sampling(self, index: int) -> SamplingParams:
        """Return what answer `index` asks of the sampler: one answer computes the prompt's log-probabilities, not n."""
        if self.sampling.n == 1:
            return self.sampling
        if index == 0:
            return replace(self.sampling, n=1)
        return replace(self.sampling, n=1, prompt_logprobs=None, prompt_logprob_start=None)

    def answer_seed(self, index: int) -> int:
        """Return the seed of answer `index`; the first one's is the request's own, whatever n is."""
        if index == 0:
            return self.seed
        digest = hashlib.blake2b(f"{self.seed}#{index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def take_prompt_logprobs(self, start: int, positions: list[TokenLogprobs], decode: DecodeToken) -> None:
        """Keep what a chunk that began at token `start` says of the tokens after it, from the first one wanted on.

        A request that was preempted computes a chunk again; the same places are then written again.
        """
        assert self.prompt_logprobs is not None, f"{self.request_id} did not ask for prompt log-probabilities"
        first = max(start + 1, self.sampling.prompt_logprob_start or 1)
        for index, position in enumerate(positions, start=first):
            self.prompt_logprobs[index] = decode_logprobs(position, decode)

    def output(self, outputs: list[CompletionOutput]) -> RequestOutput:
        """Return these parts of the answers with all that is known of the prompt."""
        first = self.answers[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=outputs,
            finished=self.is_finished,
            metrics=RequestMetrics(
                arrival_time=self.arrival_time,
                first_token_time=self.first_token_time,
                finish_time=self.finish_time,
                num_preemptions=sum(answer.request.num_preemptions for answer in self.answers),
                num_draft_tokens=sum(answer.request.num_drafts for answer in self.answers),
                num_accepted_tokens=sum(answer.request.num_accepted_drafts for answer in self.answers),
            ),
            prompt_logprobs=self.prompt_logprobs,
            num_cached_tokens=first.num_cached_tokens,
            cache=first.cache,
        )


@dataclass(slots=True)
class Answer:
    """One of a caller's n answers, and the scheduler request that makes it."""

    caller: CallerRequest
    index: int
    request: Request
    detokenizer: Detokenizer
    first_step_id: int
    """No step before this one computes anything of it."""
    cumulative_logprob: float = 0.0
    is_finished: bool = False

    def advance(
        self,
        new_token_ids: tuple[int, ...],
        finish_reason: str | None,
        logprobs: Sequence[TokenLogprobs],
        decode: DecodeToken,
    ) -> CompletionOutput:
        """Take in a step's tokens; return what is new, ended early when a stop string is complete.

        finish_reason: the scheduler's verdict on the last of them; logprobs: empty unless the request asked for them.
        """
        stop_reason = self.request.stop_reason
        token_ids, text, stop = self._detokenize(new_token_ids, finish_reason)
        if stop is not None:
            finish_reason, stop_reason = "stop", stop
        self.is_finished = finish_reason is not None
        asked = self.caller.sampling.logprobs is not None
        # A stop string can end the answer before the last of them.
        logprobs = logprobs[: len(token_ids)]
        self.cumulative_logprob += sum(logprob.logprob for logprob in logprobs)
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=self.cumulative_logprob if asked else None,
            logprobs=[decode_logprobs(logprob, decode) for logprob in logprobs] if asked else None,
            finish_reason=finish_reason,
            stop_reason=stop_reason,
        )

    def _detokenize(
        self, new_token_ids: tuple[int, ...], finish_reason: str | None
    ) -> tuple[list[int], str, str | None]:
        """Return the tokens up to a stop string, the text released, and that string."""
        # The token that stopped the answer is reported, its text is no part of the answer. The last one of a structured
        # output that is complete stopped nothing.
        is_stopped = finish_reason == "stop" and new_token_ids[-1] in self.request.stop_token_ids
        hides_last = is_stopped and not self.caller.sampling.include_stop_str_in_output
        released = ""
        for num, token_id in enumerate(new_token_ids[: len(new_token_ids) - hides_last], start=1):
            text, stop = self.detokenizer.add(token_id)
            released += text
            if stop is not None:
                return list(new_token_ids[:num]), released, stop
        if finish_reason is None:
            return list(new_token_ids), released, None
        text, stop = self.detokenizer.finish()
        return list(new_token_ids), released + text, stop
