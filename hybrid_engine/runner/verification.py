"""Which drafts of a request hold, and the token that follows them.

A request's token at a position is a function of the logits there, its parameters, its seed and the position
(`Sampler`), its draw being fixed before anyone drafts. So a draft is accepted if and only if it *is* that token; the
first one that differs is replaced by it, and what was drafted behind it is dropped. Every token that comes out is the
one that a run without drafts takes from the same logits: the text is the same, greedy or sampled, not only its
distribution. It is rejection sampling (Leviathan et al., "Fast Inference from Transformers via Speculative Decoding",
2023, section 2.3) with target and draft coupled through one draw: for a fixed draft x both accept with probability
p(x), and what replaces a rejected one is distributed as p without x.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hybrid_engine.runner.sampler import RequestSampling, Sampler

Drafts = Sequence[int]


def choose_tokens(
    sampler: Sampler,
    logits_XV: np.ndarray,
    requests: Sequence[RequestSampling],
    positions: Sequence[int],
    drafts: Sequence[Drafts],
) -> list[list[int]]:
    """Return, for each request, the drafts that hold and one token more, each taken in (`RequestSampling.advance`).

    A structured output that is complete with an accepted draft ends there.

    logits_XV: float32; for each request in turn the logits behind its last known token and behind each of its drafts.
    positions: each request's first new position.
    """
    if all([request.is_plain_greedy for request in requests]):
        return _choose_greedily(sampler, logits_XV, requests, positions, drafts)
    chosen, start = [], 0
    for request, position, guesses in zip(requests, positions, drafts, strict=True):
        end = start + 1 + len(guesses)
        chosen.append(_choose(sampler, logits_XV[start:end], request, position, guesses))
        start = end
    return chosen


def _choose(
    sampler: Sampler, logits_XV: np.ndarray, request: RequestSampling, position: int, drafts: Drafts
) -> list[int]:
    """One row after the other, since penalties and grammars depend on the tokens before."""
    chosen: list[int] = []
    for index in range(len(logits_XV)):
        token_id = int(sampler.sample(logits_XV[index : index + 1], [request], [position + index])[0])
        chosen.append(token_id)
        request.advance(token_id)
        is_rejected = index < len(drafts) and token_id != drafts[index]
        if is_rejected or request.finish_reason is not None:
            break
    return chosen


def _choose_greedily(
    sampler: Sampler,
    logits_XV: np.ndarray,
    requests: Sequence[RequestSampling],
    positions: Sequence[int],
    drafts: Sequence[Drafts],
) -> list[list[int]]:
    """All rows at once: nothing but the logits decides."""
    rows = [
        (request, position + index)
        for request, position, guesses in zip(requests, positions, drafts, strict=True)
        for index in range(1 + len(guesses))
    ]
    token_ids_X = sampler.sample(logits_XV, [request for request, _ in rows], [position for _, position in rows])
    return keep_accepted(token_ids_X, drafts)


def keep_accepted(token_ids_X: np.ndarray, drafts: Sequence[Drafts]) -> list[list[int]]:
    """Return, for each request, the drafts that hold and one token more.

    token_ids_X: for each request in turn what follows its last known token and each of its drafts.
    """
    chosen, start = [], 0
    for guesses in drafts:
        token_ids = token_ids_X[start : start + 1 + len(guesses)].tolist()
        start += len(token_ids)
        num_accepted = 0
        while num_accepted < len(guesses) and token_ids[num_accepted] == guesses[num_accepted]:
            num_accepted += 1
        chosen.append(token_ids[: num_accepted + 1])
    return chosen
