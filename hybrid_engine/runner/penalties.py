"""Penalties on tokens that were seen before: how often each was, and what that does to its logit.

Repetition as in CTRL (Keskar et al. 2019, section 4.1), for tokens of the prompt and the answer; presence and
frequency as in OpenAI's API, for tokens of the answer. Repetition comes first.
"""

from __future__ import annotations

import numpy as np

from hybrid_engine.sampling_params import SamplingParams


class TokenCounts:
    """The distinct tokens of one request and how often each stands in its answer; those of the prompt alone have 0."""

    def __init__(self, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """token_ids: the prompt, then what was generated so far."""
        distinct, index_of_token = np.unique(token_ids, return_inverse=True)
        counts = np.bincount(index_of_token[num_prompt_tokens:], minlength=len(distinct))
        self._size = len(distinct)
        # Room for as many again, so that growing is rare.
        self._token_ids = np.resize(distinct.astype(np.int64), 2 * self._size)
        self._counts = np.resize(counts.astype(np.float32), 2 * self._size)
        self._index_of = dict(zip(distinct.tolist(), range(self._size), strict=True))

    @property
    def token_ids(self) -> np.ndarray:
        """int64, each distinct token once."""
        return self._token_ids[: self._size]

    @property
    def counts(self) -> np.ndarray:
        """float32, how often the answer has each of token_ids."""
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """Count one more token of the answer."""
        index = self._index_of.setdefault(token_id, self._size)
        if index == self._size:
            self._append(token_id)
        self._counts[index] += 1

    def _append(self, token_id: int) -> None:
        if self._size == len(self._token_ids):
            self._token_ids = np.resize(self._token_ids, 2 * self._size)
            self._counts = np.resize(self._counts, 2 * self._size)
        self._token_ids[self._size] = token_id
        self._counts[self._size] = 0
        self._size += 1


def has_penalties(sampling: SamplingParams) -> bool:
    """Whether tokens seen before get other logits."""
    return sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0


def penalise_in_place(logits_V: np.ndarray, counts: TokenCounts, sampling: SamplingParams) -> None:
    """Lower (or raise) the logits of the tokens that counts knows."""
    seen = logits_V[counts.token_ids]
    if sampling.repetition_penalty != 1:
        penalty = np.float32(sampling.repetition_penalty)
        seen = np.where(seen > 0, seen / penalty, seen * penalty)
    seen -= np.float32(sampling.frequency_penalty) * counts.counts
    seen -= np.float32(sampling.presence_penalty) * (counts.counts > 0)
    logits_V[counts.token_ids] = seen
