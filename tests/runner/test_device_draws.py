"""Tokens chosen where the logits lie: the same as the host chooses, and only what must be edited comes to the host."""

import numpy as np
import pytest
import torch
from hand_plans import VOCAB_SIZE, Hand

from hybrid_engine.runner import device_draws, model_runner
from hybrid_engine.runner.device_draws import choose_on_device, is_drawn_on_device
from hybrid_engine.runner.sampler import Sampler
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import StartedRequest

DRAWN = {
    "greedy": SamplingParams(temperature=0),
    "hot": SamplingParams(temperature=30.0),
    "filtered": SamplingParams(temperature=30.0, top_k=20, top_p=0.9, min_p=0.001),
    "tiny temperature": SamplingParams(temperature=1e-300),
}
EDITED = {
    "penalised": SamplingParams(temperature=30.0, presence_penalty=1.0),
    "biased": SamplingParams(temperature=0, logit_bias=((3, 50.0),)),
    "not yet to end": SamplingParams(temperature=30.0, min_tokens=3, stop_token_ids=(3,)),
    "asked for logprobs": SamplingParams(temperature=30.0, logprobs=2),
}
ALL = DRAWN | EDITED


def run(hand: Hand, is_on_device: bool) -> tuple[dict, list]:
    hand.runner._draws_on_device = is_on_device
    for seed, (name, sampling) in enumerate(ALL.items()):
        hand.add(name, [5, 9, 2, 33, seed], sampling, seed=seed)
    first = hand.step(dict.fromkeys(ALL, 5))
    return hand.run(dict.fromkeys(ALL, 6)), [first.sampled, first.logprobs]


def request_of(sampling: SamplingParams):
    started = StartedRequest("r", (1, 2, 3), 3, 0, ((),), sampling, 0)
    return Sampler(VOCAB_SIZE).prepare(started, np.array([1, 2, 3]))


@pytest.mark.parametrize("name", ALL)
def test_only_what_filters_alone_decide_is_drawn_on_the_device(name):
    assert is_drawn_on_device(request_of(ALL[name])) == (name in DRAWN)


def test_requests_of_every_kind_in_one_step_get_the_tokens_that_the_host_gives(hand, make_hand):
    assert run(hand, True) == run(make_hand(), False)


def test_the_host_sees_the_logits_of_edited_requests_alone(hand, monkeypatch):
    seen = []

    def watched(sampler, logits_XV, requests, *rest):
        seen.append((len(logits_XV), [request.request_id for request in requests]))
        return device_draws_choose(sampler, logits_XV, requests, *rest)

    device_draws_choose = device_draws.choose_tokens
    monkeypatch.setattr(device_draws, "choose_tokens", watched)
    monkeypatch.setattr(model_runner, "choose_tokens", None)
    run(hand, True)
    assert {(count, tuple(ids)) for count, ids in seen} == {(len(EDITED), tuple(EDITED))}


def test_logits_that_are_not_finite_are_an_error_that_names_the_request():
    requests = [request_of(DRAWN["hot"])]
    with pytest.raises(AssertionError, match=r"not finite, of \['r'\]"):
        choose_on_device(Sampler(4), torch.tensor([[0.0, torch.nan, 1.0, 2.0]]), None, requests, [3])
