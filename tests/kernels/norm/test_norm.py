"""RMSNorm and its fusions against plain torch."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.norm import add_rms_norm, norm_add_norm, reference, rms_norm

pytestmark = pytest.mark.usefixtures("path")

# float32: the mean in another order. bfloat16: computed in float32 and rounded alike, so at most one unit in the last
# of 8 bits where the float32 results straddle a tie; after a second norm of that, two.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-6, "atol": 1e-3}}

SIZES = [1, 15, 16, 17, 640, 1000]


def options(zero_centered=True):
    return {"eps": 1e-6, "zero_centered": zero_centered}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("zero_centered", [True, False])
def test_rms_norm_of_any_width(dtype, size, zero_centered):
    x_TE, weight_E = torch.randn(5, size).to(dtype) * 3, torch.randn(size).to(dtype)
    expected = reference.rms_norm(x_TE, weight_E, **options(zero_centered))
    torch.testing.assert_close(rms_norm(x_TE, weight_E, **options(zero_centered)), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("size", SIZES)
def test_adding_and_norming_at_once(dtype, size):
    x_TE, residual_TE, weight_E = (torch.randn(4, size).to(dtype), torch.randn(4, size).to(dtype), torch.randn(size))
    before = residual_TE.clone()
    got = add_rms_norm(x_TE, residual_TE, weight_E, **options())
    expected = reference.add_rms_norm(x_TE, residual_TE, weight_E, **options())
    torch.testing.assert_close(got[0], expected[0], **TOLERANCE[dtype])
    assert torch.equal(got[1], expected[1])
    assert torch.equal(residual_TE, before)


@pytest.mark.parametrize("size", SIZES)
def test_norming_adding_and_norming_at_once(dtype, size):
    x_TE, residual_TE = torch.randn(4, size).to(dtype), torch.randn(4, size).to(dtype)
    weights = {"post_weight_E": torch.randn(size).to(dtype), "pre_weight_E": torch.randn(size).to(dtype)}
    got = norm_add_norm(x_TE, residual_TE, **weights, **options())
    expected = reference.norm_add_norm(x_TE, residual_TE, **weights, **options())
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


def test_many_rows_on_several_threads(dtype):
    x_TE, weight_E = torch.randn(300, 640).to(dtype), torch.randn(640).to(dtype)
    expected = reference.rms_norm(x_TE, weight_E, **options())
    torch.testing.assert_close(rms_norm(x_TE, weight_E, **options()), expected, **TOLERANCE[dtype])


def test_heads_of_a_projection_are_normed_in_place_of_rows(dtype):
    x_THD, weight_D = torch.randn(6, 3, 40)[:, :2].to(dtype), torch.randn(40)
    expected = reference.rms_norm(x_THD, weight_D, **options())
    torch.testing.assert_close(rms_norm(x_THD, weight_D, **options()), expected, **TOLERANCE[dtype])


def test_a_slice_of_columns_is_accepted(dtype):
    wide, weight_E = torch.randn(4, 100).to(dtype), torch.randn(32)
    expected = reference.rms_norm(wide[:, 10:42], weight_E, **options())
    torch.testing.assert_close(rms_norm(wide[:, 10:42], weight_E, **options()), expected, **TOLERANCE[dtype])


def test_no_rows_give_no_rows(dtype):
    assert rms_norm(torch.zeros(0, 8).to(dtype), torch.zeros(8), **options()).shape == (0, 8)


def test_zeros_stay_zeros(dtype):
    assert not rms_norm(torch.zeros(2, 8).to(dtype), torch.ones(8), **options()).any()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rms_norm(x, torch.zeros(7), **options()), "weight_E has shape"),
        (lambda x: rms_norm(x.half(), torch.zeros(8), **options()), "x_TE is float16"),
        (lambda x: add_rms_norm(x, x[:1], torch.zeros(8), **options()), "residual_TE has shape"),
        (lambda x: add_rms_norm(x, x.bfloat16(), torch.zeros(8), **options()), "residual_TE is"),
        (
            lambda x: norm_add_norm(x, x, post_weight_E=torch.zeros(8), pre_weight_E=torch.zeros(1), **options()),
            "pre_weight_E has shape",
        ),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(call, message):
    with pytest.raises(ShapeError, match=message):
        call(torch.zeros(2, 8))
