from collections import Counter

import numpy as np
import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from hybrid_engine.runner.penalties import TokenCounts, penalise_in_place
from hybrid_engine.sampling_params import SamplingParams

PROMPT, OUTPUT = [3, 3, 5, 8], [5, 9, 9, 2]


def logits() -> np.ndarray:
    return (np.random.default_rng(0).standard_normal(60) * 2).astype(np.float32)


def penalised(counts: TokenCounts, sampling: SamplingParams) -> np.ndarray:
    logits_V = logits()
    penalise_in_place(logits_V, counts, sampling)
    return logits_V


@pytest.mark.parametrize("penalty", [1.7, 0.6])
def test_repetition_divides_positive_and_multiplies_negative_logits_of_prompt_and_answer(penalty):
    found_V = penalised(TokenCounts(np.array(PROMPT + OUTPUT), 4), SamplingParams(repetition_penalty=penalty))
    oracle = RepetitionPenaltyLogitsProcessor(penalty)
    expected_V = oracle(torch.tensor([PROMPT + OUTPUT]), torch.from_numpy(logits())[None])[0]
    np.testing.assert_allclose(found_V, expected_V.numpy(), rtol=1e-6)


def test_presence_and_frequency_count_the_answer_and_not_the_prompt():
    sampling = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    found_V = penalised(TokenCounts(np.array(PROMPT + OUTPUT), 4), sampling)
    expected_V = logits()
    for token_id, count in Counter(OUTPUT).items():
        expected_V[token_id] -= 0.5 - 0.25 * count
    np.testing.assert_allclose(found_V, expected_V, rtol=1e-6)


def test_repetition_comes_before_presence_and_frequency():
    sampling = SamplingParams(repetition_penalty=2, presence_penalty=0.5, frequency_penalty=0.25)
    found_V = penalised(TokenCounts(np.array([1, *PROMPT[:3], 5, 5]), 4), sampling)
    logit = float(logits()[5])
    assert found_V[5] == pytest.approx((logit / 2 if logit > 0 else logit * 2) - 0.5 - 2 * 0.25)


def test_counts_that_grew_equal_counts_made_anew():
    answer = np.random.default_rng(2).integers(0, 60, 90)
    grown, made = TokenCounts(np.array(PROMPT), 4), TokenCounts(np.concatenate([PROMPT, answer]), 4)
    for token_id in answer.tolist():
        grown.add(token_id)
    sampling = SamplingParams(repetition_penalty=1.3, presence_penalty=0.3, frequency_penalty=0.4)
    assert (penalised(grown, sampling) == penalised(made, sampling)).all()
    assert sorted(grown.token_ids.tolist()) == sorted(set(PROMPT) | set(answer.tolist()))
