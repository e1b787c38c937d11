import numpy as np
import pytest
import torch

from hybrid_engine.runner.logprobs import token_logprobs


def logprobs_of(logits_V: np.ndarray, token_id: int, num_top: int):
    return token_logprobs(logits_V, token_id, num_top=num_top, scratch_V=np.empty_like(logits_V))


@pytest.mark.parametrize("offset", [-500, 0, 500])
@pytest.mark.parametrize("size", [2, 700, 262_144])
def test_log_probabilities_are_those_of_a_log_softmax_in_float64(size, offset):
    logits_V = (np.random.default_rng(size).standard_normal(size) * 4 + offset).astype(np.float32)
    exact_V = torch.from_numpy(logits_V).double().log_softmax(0)
    token_id = size // 3
    found = logprobs_of(logits_V, token_id, 5)
    best = exact_V.topk(min(5, size))
    assert found.logprob == pytest.approx(float(exact_V[token_id]), abs=1e-5)
    assert found.rank == 1 + int((exact_V > exact_V[token_id]).sum())
    assert [token for token, _ in found.top] == best.indices.tolist()
    assert [value for _, value in found.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_equal_logits_share_a_rank_and_stand_by_id():
    logits_V = np.array([0, 2, 1, 2, 2], np.float32)
    found = logprobs_of(logits_V, 3, 4)
    assert found.rank == 1
    assert [token for token, _ in found.top] == [1, 3, 4, 2]


def test_no_top_tokens_are_reported_when_none_are_asked_for():
    found = logprobs_of(np.zeros(10, np.float32), 3, 0)
    assert (found.token_id, found.top) == (3, ())
    assert found.logprob == pytest.approx(-np.log(10))


def test_an_impossible_token_has_a_log_probability_of_minus_infinity():
    found = logprobs_of(np.array([0, -np.inf, 0], np.float32), 1, 3)
    assert (found.logprob, found.rank, found.top[-1]) == (-np.inf, 3, (1, -np.inf))
