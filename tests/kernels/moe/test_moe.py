"""Experts against one token and one expert after the other."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.moe import Activation, PackedExperts, moe

pytestmark = pytest.mark.usefixtures("path")

ACTIVATIONS = [
    Activation("silu"),
    Activation("gelu"),
    Activation("gelu_tanh"),
    Activation("relu_squared"),
    Activation("swiglu_clamped", alpha=1.7, limit=0.6),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda activation: activation.kind)
def test_every_activation(problem, dtype, activation):
    problem(activation=activation, dtype=dtype).check()


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 17, 90])
def test_any_number_of_tokens(problem, dtype, num_tokens):
    problem(num_tokens=num_tokens, dtype=dtype).check()


@pytest.mark.parametrize(
    ("num_experts", "num_chosen", "width", "inner"), [(1, 1, 16, 16), (3, 3, 33, 17), (9, 1, 70, 129), (70, 6, 24, 20)]
)
def test_any_shape(problem, dtype, num_experts, num_chosen, width, inner):
    problem(num_experts=num_experts, num_chosen=num_chosen, width=width, inner=inner, dtype=dtype).check()


@pytest.mark.parametrize("options", [{"has_biases": True}, {"weighs_inputs": True}, {"num_chosen": 1}], ids=str)
def test_what_some_models_do_otherwise(problem, dtype, options):
    problem(**options, dtype=dtype).check()


def test_biases_beside_weighed_inputs_are_not_weighed(problem):
    problem(has_biases=True, weighs_inputs=True).check()


def test_all_tokens_may_choose_the_same_experts(problem, dtype):
    problem(num_tokens=40, experts=[[3, 1]] * 40, dtype=dtype).check()


def test_tokens_may_lie_apart_in_memory(problem):
    one = problem()
    one.x_TE = torch.randn(5, 100)[:, 7:55]
    one.check()


def test_a_nan_stays_with_its_token(problem):
    one = problem(num_tokens=3)
    one.x_TE[1] = torch.nan
    assert one.run().isnan().all(1).tolist() == [False, True, False]


def test_a_tokens_result_does_not_depend_on_its_neighbours(problem):
    one = problem(num_tokens=9)
    whole = one.run()
    one.x_TE, one.weights_TC, one.experts_TC = one.x_TE[4:6], one.weights_TC[4:6], one.experts_TC[4:6]
    torch.testing.assert_close(one.run(), whole[4:6], rtol=1e-5, atol=1e-6)  # sums in another order


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x_TE": torch.zeros(3, 8).bfloat16()}, "x_TE is bfloat16"),
        ({"x_TE": torch.zeros(3, 9)}, "x_TE has shape"),
        ({"weights_TC": torch.zeros(3, 1)}, "weights_TC has shape"),
        ({"weights_TC": torch.zeros(3, 2).double()}, "weights_TC is float64"),
        ({"experts_TC": torch.zeros(3, 2).int()}, "experts_TC is int32"),
        ({"activation": Activation("relu")}, "activation is 'relu'"),
        ({"activation": Activation("relu_squared")}, r"must be \[4, 6, 8\]"),
        ({"down_bias_XE": torch.zeros(4, 7)}, "down_bias_XE has shape"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@on_cpu_paths
def test_inputs_that_do_not_fit_are_refused(change, message):
    options = {
        "x_TE": torch.zeros(3, 8),
        "weights_TC": torch.zeros(3, 2),
        "experts_TC": torch.zeros(3, 2).long(),
        "gate_up": PackedExperts.pack(torch.zeros(4, 12, 8)),
        "down": PackedExperts.pack(torch.zeros(4, 8, 6)),
        "activation": Activation("silu"),
    } | change
    with pytest.raises(ShapeError, match=message):
        moe(**options)
