"""The gated RMSNorm behind a scan, against plain torch."""

import pytest
import torch
from kernel_paths import on_cpu_paths
from torch.nn import functional as F

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.ssm import gated_rms_norm, reference

pytestmark = pytest.mark.usefixtures("path")

# float32: the mean in another order. bfloat16: rounded once to 8 bits; a value on a tie may fall to either side.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-5}}


@pytest.mark.parametrize(("size", "group_size"), [(1, 1), (37, 37), (60, 20), (96, 32), (1536, 768)])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
@pytest.mark.parametrize("norm_before_gate", [False, True])
def test_groups_of_any_size_are_normed_apart(dtype, size, group_size, norm_before_gate, activation):
    x_TI, gate_TI, weight_I = torch.randn(30, size).to(dtype), torch.randn(30, size).to(dtype), torch.randn(size)
    options = {"eps": 1e-5, "group_size": group_size, "norm_before_gate": norm_before_gate, "activation": activation}
    wanted = reference.gated_rms_norm(x_TI, gate_TI, weight_I, **options)
    torch.testing.assert_close(gated_rms_norm(x_TI, gate_TI, weight_I, **options), wanted, **TOLERANCE[dtype])


def test_without_a_group_size_all_columns_are_normed_together_behind_the_gate():
    x_TI, gate_TI, weight_I = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    wanted = F.rms_norm(x_TI * F.silu(gate_TI), (40,), weight_I, 1e-5)
    torch.testing.assert_close(gated_rms_norm(x_TI, gate_TI, weight_I, eps=1e-5), wanted, rtol=1e-5, atol=1e-6)


def test_norm_before_gate_leaves_the_gate_out_of_the_mean():
    x_TI, gate_TI, weight_I = torch.randn(5, 40), torch.randn(5, 40), torch.randn(40)
    got = gated_rms_norm(x_TI, gate_TI, weight_I, eps=1e-5, norm_before_gate=True)
    torch.testing.assert_close(got, F.rms_norm(x_TI, (40,), weight_I, 1e-5) * F.silu(gate_TI), rtol=1e-5, atol=1e-6)


def test_columns_and_dtypes_of_a_wider_projection_are_accepted():
    wide = torch.randn(6, 100)
    x_TI, gate_TI, weight_I = wide[:, 10:42].bfloat16(), wide[:, 50:82], torch.randn(32).bfloat16()
    options = {"eps": 1e-5, "group_size": 16, "norm_before_gate": False, "activation": "silu"}
    wanted = reference.gated_rms_norm(x_TI, gate_TI, weight_I, **options)
    got = gated_rms_norm(x_TI, gate_TI, weight_I, **options)
    torch.testing.assert_close(got, wanted, **TOLERANCE[torch.bfloat16])


def test_gates_far_from_zero_stay_finite():
    gate_TI = torch.tensor([[-300.0, -90.0, 90.0, 300.0]])
    got = gated_rms_norm(torch.ones(1, 4), gate_TI, torch.ones(4), eps=1e-5, norm_before_gate=True)
    torch.testing.assert_close(got, F.silu(gate_TI), rtol=1e-4, atol=1e-6)


def test_no_rows_give_no_rows(dtype):
    x_TI = torch.zeros(0, 8).to(dtype)
    assert gated_rms_norm(x_TI, x_TI, torch.zeros(8), eps=1e-5).shape == (0, 8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gate_TI": torch.zeros(2, 7)}, "gate_TI has shape"),
        ({"weight_I": torch.zeros(7)}, "weight_I has shape"),
        ({"gate_TI": torch.zeros(2, 8).half()}, "gate_TI is float16"),
        ({"group_size": 3}, "group_size is 3, must divide the 8 columns"),
        ({"group_size": 0}, "group_size is 0"),
        ({"activation": "relu"}, "activation is 'relu'"),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(changes, message):
    options = {"x_TI": torch.zeros(2, 8), "gate_TI": torch.zeros(2, 8), "weight_I": torch.zeros(8)} | changes
    with pytest.raises(ShapeError, match=message):
        gated_rms_norm(**options, eps=1e-5)
