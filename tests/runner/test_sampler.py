import math

import numpy as np
import pytest
import torch

from hybrid_engine.runner.filters import highest, kth_highest, lowest_kept
from hybrid_engine.runner.sampler import RequestSampling, Sampler
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.step_plan import StartedRequest

PROMPT = (3, 3, 5, 8)
OUTPUT = (5, 9, 9, 2)
EOS = 4


def random_logits(size: int, *, seed: int = 0, spread: float = 2.5) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def prepare(sampler: Sampler, sampling: SamplingParams, *, seed: int = 0, output=()) -> RequestSampling:
    started = StartedRequest("r", PROMPT + output, len(PROMPT), 0, ((),), sampling, seed)
    return sampler.prepare(started, np.array(PROMPT + output))


def draw_many(logits_V: np.ndarray, sampling: SamplingParams, count: int, *, output=()) -> np.ndarray:
    """How often each token is drawn, at as many positions."""
    sampler = Sampler(len(logits_V))
    request = prepare(sampler, sampling, output=output)
    drawn = [sampler.sample(logits_V[None], [request], [100 + i])[0] for i in range(count)]
    return np.bincount(drawn, minlength=len(logits_V))


def exact_probabilities(logits_V: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    """What is drawn from: sort everything, look at one token after the other."""
    probs = torch.softmax(torch.from_numpy(logits_V).double() / sampling.temperature, 0).numpy()
    kept = [i for i in np.argsort(-probs, kind="stable") if probs[i] >= sampling.min_p * probs.max() * (1 - 1e-9)]
    if sampling.top_k:
        kept = [i for i in kept if np.count_nonzero(probs > probs[i]) < sampling.top_k]
    wanted, found, nucleus = sampling.top_p * probs[kept].sum(), 0.0, []
    for i in kept:
        if found < wanted or probs[i] == probs[nucleus[-1]]:
            nucleus.append(i)
            found += probs[i]
    left = np.zeros_like(probs)
    left[nucleus] = probs[nucleus]
    return left / left.sum()


def chi_squared_limit(num_free: int) -> float:
    """What is exceeded once in ten thousand (Wilson and Hilferty 1931)."""
    return num_free * (1 - 2 / (9 * num_free) + 3.72 * math.sqrt(2 / (9 * num_free))) ** 3


DISTRIBUTIONS = {
    "the model's own": SamplingParams(),
    "cold": SamplingParams(temperature=0.6),
    "hot": SamplingParams(temperature=3),
    "top_k": SamplingParams(top_k=7),
    "top_k of one": SamplingParams(top_k=1),
    "top_p": SamplingParams(top_p=0.8),
    "top_p below the likeliest": SamplingParams(top_p=0.01),
    "min_p": SamplingParams(min_p=0.1),
    "all filters": SamplingParams(temperature=1.3, top_k=20, top_p=0.9, min_p=0.02),
}


@pytest.mark.parametrize("sampling", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS.keys())
def test_tokens_are_drawn_as_often_as_their_probabilities_say(sampling):
    logits_V = random_logits(60)
    probs = exact_probabilities(logits_V, sampling)
    drawn = draw_many(logits_V, sampling, 5_000)
    assert drawn[probs == 0].sum() == 0
    expected = probs[probs > 0] * drawn.sum()
    statistic = ((drawn[probs > 0] - expected) ** 2 / expected).sum()
    assert statistic <= chi_squared_limit(max(1, len(expected) - 1))


def test_a_vocabulary_of_several_blocks_is_drawn_from_evenly():
    drawn = draw_many(np.zeros(1300, np.float32), SamplingParams(), 5_000)
    sums = np.add.reduceat(drawn, np.arange(0, 1300, 130))
    assert ((sums - 500) ** 2 / 500).sum() <= chi_squared_limit(9)


@pytest.mark.parametrize(
    "sampling",
    [
        *DISTRIBUTIONS.values(),
        SamplingParams(top_k=300),
        SamplingParams(top_k=2999),
        SamplingParams(top_p=0.999, temperature=2.5),
        SamplingParams(top_p=0.97, temperature=40),
        SamplingParams(min_p=1),
        SamplingParams(min_p=0.05, temperature=0.5),
        SamplingParams(min_p=0.3, top_k=200),
        SamplingParams(top_k=40, top_p=0.5),
    ],
)
@pytest.mark.parametrize("has_ties", [False, True], ids=["distinct", "ties"])
def test_filters_keep_exactly_the_tokens_that_a_sorted_list_keeps(sampling, has_ties):
    logits_V = random_logits(3000, seed=1)
    if has_ties:
        logits_V = np.round(logits_V * 2) / 2
    lowest = lowest_kept(logits_V, sampling, peak=float(logits_V.max()), scratch_V=np.empty_like(logits_V))
    assert (
        np.flatnonzero(logits_V >= lowest).tolist() == np.flatnonzero(exact_probabilities(logits_V, sampling)).tolist()
    )


@pytest.mark.parametrize("size", [1, 5, 63, 512, 513, 40_001, 262_144])
@pytest.mark.parametrize("k", [1, 2, 50, 1000])
def test_the_kth_highest_is_found_in_vocabularies_of_any_size(size, k):
    logits_V = random_logits(size, seed=size)
    k = min(k, size)
    assert kth_highest(logits_V, k) == np.sort(logits_V)[-k]
    assert highest(logits_V, k).tolist() == np.argsort(-logits_V, kind="stable")[:k].tolist()


def test_the_highest_of_equal_logits_stand_in_the_order_of_their_ids():
    logits_V = np.zeros(3000, np.float32)
    logits_V[[7, 2900]] = 1
    assert highest(logits_V, 5).tolist() == [7, 2900, 0, 1, 2]


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(temperature=0, min_tokens=1)])
def test_greedy_takes_the_lowest_id_of_equal_logits(sampling):
    logits_RV = np.zeros((2, 40_000), np.float32)
    logits_RV[0, [9, 800, 39_999]] = logits_RV[1, [31_000, 31_001]] = 2
    sampler = Sampler(40_000, eos_token_ids=(EOS,))
    assert sampler.sample(logits_RV, [prepare(sampler, sampling)] * 2, [4, 4]).tolist() == [9, 31_000]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 5e-324])
def test_a_tiny_temperature_is_greedy(temperature):
    logits_V = random_logits(60)
    logits_V[[3, 17]] = -np.inf
    drawn = draw_many(logits_V, SamplingParams(temperature=temperature), 50)
    assert drawn[logits_V.argmax()] == 50
    drawn = draw_many(logits_V, SamplingParams(temperature=temperature, top_p=0.9, min_p=0.1), 50)
    assert drawn[logits_V.argmax()] == 50


def test_a_mixed_batch_gives_each_request_what_it_gets_alone():
    sampler = Sampler(3000, eos_token_ids=(EOS,))
    params = [
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(top_k=9),
        SamplingParams(temperature=0, repetition_penalty=3),
        SamplingParams(top_p=0.7, frequency_penalty=2),
        SamplingParams(min_tokens=6, min_p=0.01),
    ]
    logits_RV = np.stack([random_logits(3000, seed=i) for i in range(6)])
    requests = [prepare(sampler, each, seed=i, output=OUTPUT) for i, each in enumerate(params)]
    positions = list(range(8, 14))
    alone = [sampler.sample(logits_RV[i : i + 1], requests[i : i + 1], [positions[i]])[0] for i in range(6)]
    order = [4, 1, 5, 0, 3, 2]
    mixed = sampler.sample(logits_RV[order], [requests[i] for i in order], [positions[i] for i in order])
    assert mixed.tolist() == [alone[i] for i in order]


def test_sampling_changes_no_logits():
    logits_RV = random_logits(6000).reshape(2, 3000)
    before = logits_RV.copy()
    sampler = Sampler(3000)
    sampling = SamplingParams(repetition_penalty=2, presence_penalty=1, top_p=0.5, min_tokens=9, stop_token_ids=(7,))
    sampler.sample(logits_RV, [prepare(sampler, sampling, output=OUTPUT)] * 2, [8, 9])
    assert (logits_RV == before).all()


@pytest.mark.parametrize(
    ("ignore_eos", "position", "chosen"),
    [(False, 4, 1), (False, 6, 1), (False, 7, EOS), (True, 4, EOS), (True, 6, EOS)],
)
def test_min_tokens_forbids_what_would_end_the_answer_and_nothing_else(ignore_eos, position, chosen):
    sampler = Sampler(20, eos_token_ids=(EOS,))
    sampling = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(9, 999), ignore_eos=ignore_eos)
    logits_V = np.zeros(20, np.float32)
    logits_V[[9, EOS, 1]] = (3, 3.5, 1)
    assert sampler.sample(logits_V[None], [prepare(sampler, sampling)], [position])[0] == chosen


def test_min_tokens_forbids_stop_tokens_also_where_eos_is_ignored():
    sampler = Sampler(20, eos_token_ids=(EOS,))
    sampling = SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(9,), ignore_eos=True)
    logits_V = np.zeros(20, np.float32)
    logits_V[[9, EOS]] = (3, 2)
    assert sampler.sample(logits_V[None], [prepare(sampler, sampling)], [6])[0] == EOS


@pytest.mark.parametrize("sampling", [SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_an_error(sampling, bad):
    logits_V = random_logits(600)
    logits_V[77] = bad
    sampler = Sampler(600)
    with pytest.raises(AssertionError, match="highest logit"):
        sampler.sample(logits_V[None], [prepare(sampler, sampling)], [5])


def test_logits_that_are_all_forbidden_are_an_error():
    sampler = Sampler(2, eos_token_ids=(0, 1))
    with pytest.raises(AssertionError, match="highest logit is -inf for position 5 of r"):
        sampler.sample(np.zeros((1, 2), np.float32), [prepare(sampler, SamplingParams(min_tokens=9))], [5])


def test_a_bias_is_added_to_a_tokens_logit_also_under_greedy():
    logits_RV = np.array([[1.0, 2.0, 3.0, 0.0, 0.0, 0.0]], np.float32)
    sampler = Sampler(6)
    request = prepare(sampler, SamplingParams(temperature=0, logit_bias={1: 5, 2: -100}), output=())
    assert sampler.sample(logits_RV, [request], [10])[0] == 1
    assert logits_RV[0, 1] == 2.0
