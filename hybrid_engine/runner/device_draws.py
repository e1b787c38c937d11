"""Which tokens a GPU chooses itself, so that a step brings a number a request to the host instead of its logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.kernels.sampling import draw_in_place
from hybrid_engine.runner.draws import uniform
from hybrid_engine.runner.sampler import RequestSampling, Sampler, greedy_tokens
from hybrid_engine.runner.verification import choose_tokens

_LARGEST = float(np.finfo(np.float32).max)
"""Stands for what a tiny temperature makes of 1 / temperature."""


@dataclass(frozen=True)
class Chosen:
    """What each request goes on with."""

    token_ids: list[list[int]]
    host_logits_XV: np.ndarray | None
    """float32, of the requests whose tokens the host chose, in their order; None if there are none."""
    places: list[int]
    """For each request, where its logits begin there; of one whose token the device chose, anything."""


def is_drawn_on_device(request: RequestSampling) -> bool:
    """Whether nothing but filters stands between logits and draw, and nobody asks for log-probabilities."""
    is_unedited = request.counts is None and request.grammar is None and request.bias is None
    return is_unedited and len(request.forbidden_token_ids) == 0 and request.sampling.logprobs is None


def choose_on_device(
    sampler: Sampler,
    logits_RV: Tensor,
    greedy_R: Tensor | None,
    requests: Sequence[RequestSampling],
    positions: Sequence[int],
) -> Chosen:
    """Choose a token for each request where the logits lie; on the host for those whose logits must be edited first.

    greedy_R: greedy_tokens of the logits, if known; not changed.
    """
    token_ids_R = draw_tokens(logits_RV, greedy_R, requests, positions)
    hosted = [row for row, request in enumerate(requests) if not is_drawn_on_device(request)]
    host_logits_XV = None
    found: list[list[int]] = []
    if hosted:
        host_logits_XV = logits_RV[torch.tensor(hosted, device=logits_RV.device)].cpu().numpy()
        mine = [requests[row] for row in hosted]
        found = choose_tokens(sampler, host_logits_XV, mine, [positions[row] for row in hosted], [()] * len(hosted))
    token_ids = [[token_id] for token_id in token_ids_R.tolist()]
    places = [0] * len(requests)
    for place, row in enumerate(hosted):
        token_ids[row], places[row] = found[place], place
    wrong = [request.request_id for request, tokens in zip(requests, token_ids, strict=True) if tokens[0] < 0]
    assert not wrong, f"highest logits not finite, of {wrong}"
    return Chosen(token_ids, host_logits_XV, places)


def draw_tokens(
    logits_RV: Tensor, greedy_R: Tensor | None, requests: Sequence[RequestSampling], positions: Sequence[int]
) -> Tensor:
    """The token of each request that is chosen on the device, there, the likeliest of others: int64 [R]."""
    token_ids_R = (greedy_tokens(logits_RV) if greedy_R is None else greedy_R).clone()
    if any([request.sampling.temperature > 0 for request in requests]):
        numbers_RC = torch.from_numpy(_numbers(requests, positions)).to(logits_RV.device)
        draw_in_place(logits_RV, numbers_RC, token_ids_R=token_ids_R)
    return token_ids_R


def _numbers(requests: Sequence[RequestSampling], positions: Sequence[int]) -> np.ndarray:
    """The table that kernels.sampling draws by; of a request that is not drawn there, or greedy, nothing but zeros."""
    numbers_RC = np.zeros((len(requests), 5))
    for row, (request, position) in enumerate(zip(requests, positions, strict=True)):
        sampling = request.sampling
        if sampling.temperature > 0 and is_drawn_on_device(request):
            drop = sampling.temperature * math.log(sampling.min_p) if sampling.min_p > 0 else -math.inf
            inverse = min(1 / sampling.temperature, _LARGEST)
            numbers_RC[row] = inverse, drop, sampling.top_k, sampling.top_p, uniform(request.seed, position)
    return numbers_RC
