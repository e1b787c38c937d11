"""Guesses by a smaller model with the same vocabulary: an engine of ours beside the one that answers.

Each guess is a little request: the known tokens are its prompt, the drafts its answer. The draft engine's own prefix
cache finds all but the newest tokens, whether the last drafts were accepted or not, so nothing is ever rolled back. The
sampler draws by (seed, position), and a little request has the seed and the positions of the one it guesses for: where
the two models agree on the probabilities they choose the same token, also at a high temperature.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_pipeline import Runner


class DraftModelDrafter:
    """Drafts what a smaller model would answer, for all requests at once."""

    def __init__(self, scheduler: Scheduler, runner: Runner, *, max_model_len: int) -> None:
        """scheduler, runner: of the draft model, used by nobody else. max_model_len: the tokens that it reaches."""
        self._scheduler = scheduler
        self._runner = runner
        self._max_tokens = min(max_model_len, scheduler.coordinator.capacity_tokens)
        self._ids = map(str, itertools.count())

    def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[tuple[int, ...]]:
        """Return for each request its drafts: max_drafts of them, fewer where the draft model reaches no further."""
        guesses = [self._start(request, most) for request, most in zip(requests, max_drafts, strict=True)]
        while self._scheduler.has_unfinished_requests():
            plan = self._scheduler.schedule()
            self._scheduler.update(plan, self._runner.execute(plan))
        return [() if guess is None else tuple(guess.output_token_ids) for guess in guesses]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Take note of how a draft fared: of no use here."""

    def _start(self, request: Request, max_drafts: int) -> Request | None:
        # The last draft is never an input.
        num_drafts = min(max_drafts, self._max_tokens + 1 - request.num_tokens)
        if num_drafts <= 0:
            return None
        guess = Request(
            next(self._ids),
            request.token_ids,
            draft_sampling(request.sampling, num_drafts),
            hasher=self._scheduler.coordinator.hasher,
            max_model_len=request.num_tokens + num_drafts,
            # Who may not share a prefix with another in the one cache may not in the other.
            cache_salt=request.root_hash.hex(),
            seed=request.seed,
        )
        self._scheduler.add_request(guess)
        return guess


def draft_sampling(sampling: SamplingParams, num_drafts: int) -> SamplingParams:
    """Return how drafts are drawn: as the request's own tokens, without what ends or reports an answer."""
    return replace(
        sampling,
        n=1,
        max_tokens=num_drafts,
        min_tokens=0,
        stop=(),
        stop_token_ids=(),
        ignore_eos=True,
        logprobs=None,
        prompt_logprobs=None,
        prompt_logprob_start=None,
        structured_outputs=None,
        skip_reading_prefix_cache=False,
    )
