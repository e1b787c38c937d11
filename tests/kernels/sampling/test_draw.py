"""Draws on a GPU, and in Triton's interpreter, against everything sorted."""

import math

import pytest
import torch

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.sampling import draw_in_place, reference

NO_MIN_P = -math.inf
FILTERS = {
    "none": (1.0, NO_MIN_P, 0, 1.0),
    "cold": (3.0, NO_MIN_P, 0, 1.0),
    "min_p": (1.0, math.log(0.1), 0, 1.0),
    "top_k": (1.0, NO_MIN_P, 7, 1.0),
    "top_k of one": (1.0, NO_MIN_P, 1, 1.0),
    "top_k beyond the vocabulary": (1.0, NO_MIN_P, 10_000, 1.0),
    "top_p": (1.0, NO_MIN_P, 0, 0.7),
    "top_p of next to nothing": (1.0, NO_MIN_P, 0, 1e-9),
    "all of them": (0.7, math.log(0.01) / 0.7, 40, 0.9),
    "tiny temperature": (3e38, NO_MIN_P, 0, 0.9),
}

QUICK = ("none", "min_p", "all of them")


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)], autouse=True)
def triton_path(request, monkeypatch):
    request.getfixturevalue(request.param)
    from hybrid_engine.kernels.sampling import gpu

    monkeypatch.setattr(gpu, "_BLOCK", 64)


def drawn(logits_RV, numbers, likeliest_R=None):
    numbers_RC = torch.tensor(numbers, dtype=torch.float64)
    token_ids_R = logits_RV.argmax(1) if likeliest_R is None else likeliest_R
    expected_R = token_ids_R.clone()
    reference.draw_in_place(logits_RV, numbers_RC, expected_R)
    draw_in_place(logits_RV, numbers_RC, token_ids_R=token_ids_R)
    return token_ids_R.tolist(), expected_R.tolist()


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in FILTERS]
)
def test_the_token_is_that_of_everything_sorted(name):
    draws = (0.47,) if name in QUICK else (0.02, 0.47, 0.995)
    logits_RV = torch.randn(len(draws), 100) * 2.5
    got, expected = drawn(logits_RV, [(*FILTERS[name], draw) for draw in draws])
    assert got == expected


@pytest.mark.parametrize("draw", [0.0, 0.25, 0.5, 1 - 2**-53])
def test_equal_logits_stay_together_and_are_drawn_evenly(draw):
    logits_RV = torch.tensor([[1.0, 5.0, -2.0, 5.0, 5.0, -0.0, 5.0]])
    got, _ = drawn(logits_RV, [(1.0, NO_MIN_P, 2, 0.1, draw)])
    assert got == [(1, 3, 4, 6)[int(4 * draw)]]


def test_rows_that_want_the_likeliest_or_have_none_stay_as_they_are():
    logits_RV = torch.randn(2, 20)
    got, _ = drawn(logits_RV, [(0.0, NO_MIN_P, 0, 1.0, 0.9), (1.0, NO_MIN_P, 0, 1.0, 0.9)], torch.tensor([7, -1]))
    assert got == [7, -1]


def test_forbidden_tokens_are_never_drawn():
    logits_RV = torch.full((1, 100), -torch.inf)
    logits_RV[0, [3, 70]] = torch.tensor([0.0, 0.1])
    numbers = [[(0.1, NO_MIN_P, 0, 1.0, draw)] for draw in (0.0, 0.49, 0.5, 1 - 2**-53)]
    assert [drawn(logits_RV, each)[0] for each in numbers] == [[3], [3], [70], [70]]


def test_a_table_of_another_width_is_refused():
    with pytest.raises(ShapeError, match=r"numbers_RC has shape \[1, 4\]"):
        draw_in_place(torch.zeros(1, 9), torch.zeros(1, 4).double(), token_ids_R=torch.zeros(1).long())
