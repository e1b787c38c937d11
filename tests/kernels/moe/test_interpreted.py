"""Triton's experts in its interpreter, quickly; the slow tests run all of the other file on it too."""

import pytest
import torch

from hybrid_engine.kernels.linear.packed import QUANTIZATIONS
from hybrid_engine.kernels.moe import Activation, gpu

pytestmark = pytest.mark.usefixtures("interpreted")


@pytest.mark.parametrize(
    "options",
    [
        {"activation": Activation("swiglu_clamped", alpha=1.7, limit=0.6), "has_biases": True},
        {"activation": Activation("relu_squared")},
        {"weighs_inputs": True, "num_chosen": 1},
    ],
    ids=["clamped, biases", "without gates", "inputs weighed"],
)
def test_experts_as_models_have_them(problem, dtype, options):
    problem(**options, dtype=dtype).check()


@pytest.mark.parametrize("activation", [Activation("silu"), Activation("relu_squared")], ids=lambda one: one.kind)
def test_experts_in_fp8_are_those_of_the_rounded_weights(monkeypatch, problem, activation):
    monkeypatch.setitem(QUANTIZATIONS, "fp8", "cpu")  # the interpreter's tensors lie there
    problem(dtype=torch.bfloat16, activation=activation, quantization="fp8", has_biases=True).check()


@pytest.mark.parametrize(("num_tokens", "rows"), [(3, 16), (60, 64), (170, 128)])
def test_tiles_of_every_size_in_bfloat16(problem, num_tokens, rows):
    one = problem(num_tokens=num_tokens, dtype=torch.bfloat16)
    assert gpu.product_tiles(torch.bfloat16, 2 * num_tokens, 4).rows == rows
    one.check()


def test_rows_are_sorted_into_tiles_of_one_expert_each():
    experts_TC = torch.tensor([[5, 0], [5, 2], [5, 0], [2, 5]])
    row_pairs, tiles = gpu._sort(experts_TC, num_experts=7, tile_rows=3)
    assert row_pairs.tolist() == [1, 5, 3, 6, 0, 2, 4, 7]
    used = [[0, 0, 2], [2, 2, 4], [5, 4, 7], [5, 7, 8]]
    assert tiles[:4].tolist() == used
    assert (tiles[4:, 1] == tiles[4:, 2]).all(), "a tile that nobody fills must be empty"


def test_more_pairs_than_a_program_looks_at_at_once(monkeypatch, problem):
    monkeypatch.setattr(gpu, "_PAIRS", 16)
    problem(num_tokens=30).check()
