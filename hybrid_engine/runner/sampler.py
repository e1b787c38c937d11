"""The next token of each request, from its logits, its parameters and (seed, position) alone.

Order: logit_bias, penalties, what a grammar and min_tokens forbid, temperature, min_p, top_k, top_p, then a draw from
what is left.
A request that asks for none of it costs one argmax. The work is done on the host, one request at a time on float32
numpy, so that the same seed gives the same text whatever else is in the batch, after a preemption and in any chunking.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.runner.draws import pick, uniform
from hybrid_engine.runner.filters import exp_weights, lowest_kept
from hybrid_engine.runner.logprobs import token_logprobs
from hybrid_engine.runner.penalties import TokenCounts, has_penalties, penalise_in_place
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import RequestId, StartedRequest, TokenLogprobs
from hybrid_engine.structured import Grammars, GrammarState

logger = logging.getLogger(__name__)

_DRAW_BLOCK_SIZE = 512
"""A draw from the whole vocabulary sums it in blocks of so many first."""


@dataclass(frozen=True, slots=True)
class RequestSampling:
    """What the sampler needs to know of one request."""

    request_id: RequestId
    sampling: SamplingParams
    seed: int
    num_prompt_tokens: int
    forbidden_token_ids: np.ndarray
    """int64, tokens that would end the answer, while it is shorter than min_tokens."""
    counts: TokenCounts | None
    """Tokens seen before; None when nothing penalises them. Grows as the answer does."""
    grammar: GrammarState | None = None
    """Where the answer stands in what it must match; None when it may be anything. Advances as the answer does."""
    bias: tuple[np.ndarray, np.ndarray] | None = None
    """int64 token ids, and the float32 that is added to the logit of each; None when nothing is."""

    @property
    def is_plain_greedy(self) -> bool:
        """Whether every token is just the highest logit."""
        is_unedited = self.counts is None and self.grammar is None and self.bias is None
        return self.sampling.temperature == 0 and is_unedited and len(self.forbidden_token_ids) == 0

    @property
    def finish_reason(self) -> str | None:
        """Why the answer can't go on, known with its last token; None while its grammar, if any, allows more."""
        return None if self.grammar is None else self.grammar.finish_reason

    def advance(self, token_id: int) -> None:
        """Take in a token of the answer, before the next one is sampled; a draft only once it is accepted."""
        if self.counts is not None:
            self.counts.add(token_id)
        if self.grammar is not None:
            self.grammar.advance(token_id)
            if self.grammar.failure:
                logger.warning("request %s ends with 'error': %s", self.request_id, self.grammar.failure)


def greedy_tokens(logits_RV: Tensor) -> Tensor:
    """The place of each row's highest logit, of equal ones the first; below 0 where that isn't finite: int64 [R]."""
    token_ids_R = logits_RV.argmax(1)  # finds a NaN where there is one
    peaks_R = logits_RV.gather(1, token_ids_R[:, None])[:, 0]
    return torch.where(peaks_R.isfinite(), token_ids_R, -1)


class Sampler:
    """Chooses tokens. Keeps nothing of any request; its buffers are scratch."""

    def __init__(self, vocab_size: int, *, eos_token_ids: Iterable[int] = (), grammars: Grammars | None = None) -> None:
        """grammars: what structured outputs are made of; None where nobody asks for them."""
        self.vocab_size = vocab_size
        self._grammars = grammars
        self.eos_token_ids = tuple(eos_token_ids)
        self._edited_V = np.empty(vocab_size, np.float32)
        self._scratch_V = np.empty(vocab_size, np.float32)

    def prepare(self, started: StartedRequest, token_ids: np.ndarray) -> RequestSampling:
        """Return what is to be known of a request that starts, or comes back; token_ids: its tokens so far."""
        sampling = started.sampling
        forbidden: list[int] = []
        if sampling.min_tokens > 0:
            ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self.eos_token_ids)}
            # An id that no token has can't be chosen, so it needs no mask.
            forbidden = sorted(token_id for token_id in ends if 0 <= token_id < self.vocab_size)
        return RequestSampling(
            request_id=started.request_id,
            sampling=sampling,
            seed=started.seed,
            num_prompt_tokens=started.num_prompt_tokens,
            forbidden_token_ids=np.array(forbidden, np.int64),
            counts=TokenCounts(token_ids, started.num_prompt_tokens) if has_penalties(sampling) else None,
            grammar=self._grammar(sampling, token_ids[started.num_prompt_tokens :].tolist()),
            bias=_bias(sampling),
        )

    def _grammar(self, sampling: SamplingParams, output_token_ids: list[int]) -> GrammarState | None:
        if sampling.structured_outputs is None:
            return None
        assert self._grammars is not None, "structured outputs, and the sampler was made without grammars"
        return self._grammars.start(sampling.structured_outputs, output_token_ids, ignore_eos=sampling.ignore_eos)

    def sample(
        self, logits_RV: np.ndarray, requests: Sequence[RequestSampling], positions: Sequence[int]
    ) -> np.ndarray:
        """Choose each request's token for its position: int64 [R].

        logits_RV: float32, not changed. A temperature of 0 takes the highest logit, of equal ones the lowest id.
        """
        if all([request.is_plain_greedy for request in requests]):
            token_ids_R = logits_RV.argmax(1)
            # argmax finds a NaN where there is one.
            chosen_R = logits_RV[np.arange(len(requests)), token_ids_R]
            assert np.isfinite(chosen_R).all(), f"highest logits {chosen_R} of {[r.request_id for r in requests]}"
            return token_ids_R
        # A tiny temperature takes differences out of range; exp makes 0 of them, as it should.
        with np.errstate(over="ignore"):
            chosen = [self._choose(*row) for row in zip(logits_RV, requests, positions, strict=True)]
        return np.array(chosen, np.int64)

    def logprobs(self, logits_V: np.ndarray, token_id: int, sampling: SamplingParams) -> TokenLogprobs:
        """Return what a request that asked for logprobs is told of its chosen token."""
        assert sampling.logprobs is not None, "nobody asked for logprobs"
        return token_logprobs(logits_V, token_id, num_top=sampling.logprobs, scratch_V=self._scratch_V)

    def prompt_logprobs(
        self, logits_XV: np.ndarray, next_token_ids: Sequence[int], sampling: SamplingParams
    ) -> list[TokenLogprobs]:
        """Return what a request is told of the prompt tokens that follow these positions."""
        assert sampling.prompt_logprobs is not None, "nobody asked for prompt_logprobs"
        return [
            token_logprobs(logits_V, token_id, num_top=sampling.prompt_logprobs, scratch_V=self._scratch_V)
            for logits_V, token_id in zip(logits_XV, next_token_ids, strict=True)
        ]

    def _choose(self, logits_V: np.ndarray, request: RequestSampling, position: int) -> int:
        logits_V = self._edit(logits_V, request, position)
        sampling = request.sampling
        token_id = int(logits_V.argmax())
        peak = float(logits_V[token_id])
        assert math.isfinite(peak), f"highest logit is {peak} for position {position} of {request.request_id}"
        if sampling.temperature == 0:
            return token_id
        u = uniform(request.seed, position)
        lowest = lowest_kept(logits_V, sampling, peak=peak, scratch_V=self._scratch_V)
        if lowest == -math.inf:
            weights_V = exp_weights(logits_V, sampling.temperature, peak=peak, out_V=self._scratch_V)
            return _pick_in_blocks(weights_V, u)
        token_ids = np.flatnonzero(logits_V >= np.float32(lowest))
        weights = np.exp((logits_V[token_ids].astype(np.float64) - peak) / sampling.temperature)
        return int(token_ids[pick(weights, u * weights.sum())])

    def _edit(self, logits_V: np.ndarray, request: RequestSampling, position: int) -> np.ndarray:
        """Return the logits with seen tokens penalised and forbidden ones masked, in a buffer if anything changes."""
        num_output_tokens = position - request.num_prompt_tokens
        is_masked = num_output_tokens < request.sampling.min_tokens and len(request.forbidden_token_ids) > 0
        forbidden_V = None if request.grammar is None else request.grammar.forbidden_V
        if not is_masked and request.counts is None and forbidden_V is None and request.bias is None:
            return logits_V
        np.copyto(self._edited_V, logits_V)
        if request.bias is not None:
            token_ids, values = request.bias
            self._edited_V[token_ids] += values
        if request.counts is not None:
            penalise_in_place(self._edited_V, request.counts, request.sampling)
        if forbidden_V is not None:
            np.copyto(self._edited_V, -np.inf, where=forbidden_V)
        if is_masked:
            kept = self._edited_V[request.forbidden_token_ids]
            self._edited_V[request.forbidden_token_ids] = -np.inf
            if forbidden_V is not None and self._edited_V.max() == -np.inf:
                # A grammar that goes on with a stop token only: the answer must match it, however short it is.
                self._edited_V[request.forbidden_token_ids] = kept
        return self._edited_V


def _bias(sampling: SamplingParams) -> tuple[np.ndarray, np.ndarray] | None:
    if not sampling.logit_bias:
        return None
    token_ids, values = zip(*sampling.logit_bias, strict=True)
    return np.array(token_ids, np.int64), np.array(values, np.float32)


def _pick_in_blocks(weights_V: np.ndarray, u: float) -> int:
    """Pick by the fraction u of the whole weight: first a block, then a token in it."""
    block_sums = np.add.reduceat(weights_V, np.arange(0, len(weights_V), _DRAW_BLOCK_SIZE)).astype(np.float64)
    target = u * block_sums.sum()
    block = pick(block_sums, target)
    start = block * _DRAW_BLOCK_SIZE
    # Sums taken in another order may differ in the last bit: below 0 a token of weight 0 would be picked.
    rest = max(0.0, target - block_sums[:block].sum())
    return start + pick(weights_V[start : start + _DRAW_BLOCK_SIZE].astype(np.float64), rest)
