"""Gated activations against plain torch."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.activation import act_mul, reference

pytestmark = pytest.mark.usefixtures("path")

# float32: exp to two units in the last place. bfloat16: one rounding.
TOLERANCE = {torch.float32: {"rtol": 2e-6, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-4}}
KINDS = pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])


@KINDS
@pytest.mark.parametrize(("num_tokens", "width"), [(0, 8), (1, 1), (1, 2048), (3, 17), (40, 1030)])
def test_any_shape(dtype, kind, num_tokens, width):
    x_TC = torch.randn(num_tokens, 2 * width).to(dtype) * 3
    tolerance = dict(TOLERANCE[dtype])
    if kind == "gelu":
        # 1 + erf cancels where the gate is far below zero; what is left is multiplied by up to ten.
        tolerance["atol"] *= 10
    torch.testing.assert_close(act_mul(x_TC, kind=kind), reference.act_mul(x_TC, kind=kind), **tolerance)


@KINDS
def test_large_inputs_neither_overflow_nor_vanish(kind):
    gate_up = torch.tensor([[-1e4, -90.0, -20.0, 0.0, 20.0, 90.0, 1e4] + [1.0] * 7])
    torch.testing.assert_close(act_mul(gate_up, kind=kind), reference.act_mul(gate_up, kind=kind), rtol=1e-5, atol=1e-6)


@KINDS
def test_a_nan_stays_one(kind):
    assert act_mul(torch.tensor([[torch.nan, 1.0]]), kind=kind).isnan().all()


def test_a_slice_of_columns_is_accepted(dtype):
    wide = torch.randn(4, 100).to(dtype)
    assert torch.equal(act_mul(wide[:, 3:67], kind="silu"), act_mul(wide[:, 3:67].clone(), kind="silu"))


@pytest.mark.parametrize(
    ("x_TC", "kind", "message"),
    [
        (torch.zeros(2, 3), "silu", "has 3 columns"),
        (torch.zeros(2, 4), "relu", "kind is 'relu'"),
        (torch.zeros(2, 4).half(), "silu", "must be float32 or bfloat16"),
        (torch.zeros(4), "silu", "has shape"),
    ],
)
@on_cpu_paths
def test_inputs_that_do_not_fit_are_refused(x_TC, kind, message):
    with pytest.raises(ShapeError, match=message):
        act_mul(x_TC, kind=kind)
