"""Linear layers with weights in fp8, which GPUs alone have: on one, and in Triton's interpreter."""

import pytest
import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.linear import PackedLinear, linear, reference
from hybrid_engine.kernels.linear.fp8 import Fp8Form, round_to_fp8

# Sums of some dozen products in another order; bfloat16 results are rounded once.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2}}


@pytest.fixture(params=["interpreted", pytest.param("on_gpu", marks=pytest.mark.gpu)])
def triton_path(request):
    request.getfixturevalue(request.param)


def make(num_tokens, num_outputs, num_inputs, dtype=torch.bfloat16):
    return torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)


def check(x_TK, form, bias_N=None, out_dtype=None):
    out_dtype = out_dtype or x_TK.dtype
    expected = reference.fp8_linear(x_TK, form.data, form.scales_N, bias_N, out_dtype=out_dtype)
    got = form.multiply(x_TK, bias_N, out_dtype=out_dtype)
    assert got.dtype == out_dtype
    torch.testing.assert_close(got, expected, **TOLERANCE[out_dtype])


def test_a_weight_keeps_four_bits_and_its_largest_element_most_of_all():
    weight_NK = torch.randn(50, 70)
    weight_NK[7] = 0
    rounded_NK, scales_N = round_to_fp8(weight_NK)
    assert (rounded_NK.float().abs().amax(1)[scales_N < 1] == 448).all()
    assert (rounded_NK[7].float() == 0).all()
    # Half a unit of the last of four bits; below 2^-6 units are no longer relative to the number.
    error_NK = (rounded_NK.float() * scales_N[:, None] - weight_NK).abs()
    assert (error_NK <= 2**-4 * weight_NK.abs() + 2**-10 * scales_N[:, None]).all()


@pytest.mark.usefixtures("triton_path")
@pytest.mark.parametrize("num_tokens", [0, 1, 20, 40, 130])
def test_any_number_of_tokens(num_tokens):
    x_TK, weight_NK = make(num_tokens, 70, 96)
    check(x_TK, Fp8Form(weight_NK))


@pytest.mark.usefixtures("triton_path")
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (17, 33), (64, 300)])
def test_any_shape_of_weight_with_a_bias(dtype, num_outputs, num_inputs):
    x_TK, weight_NK = make(3, num_outputs, num_inputs, dtype)
    check(x_TK, Fp8Form(weight_NK), torch.randn(num_outputs))


@pytest.mark.usefixtures("triton_path")
def test_a_gpu_that_does_not_know_fp8_gets_bytes():
    x_TK, weight_NK = make(3, 32, 48)
    form = Fp8Form(weight_NK)
    form.data = form.data.view(torch.uint8)
    check(x_TK, form)


@pytest.mark.usefixtures("triton_path")
def test_logits_in_float32_lose_nothing():
    x_TK, weight_NK = make(3, 32, 48)
    check(x_TK, Fp8Form(weight_NK), out_dtype=torch.float32)


@pytest.mark.usefixtures("triton_path")
def test_many_tokens_keep_their_bits_as_few_do():
    x_TK, weight_NK = make(67, 32, 48)
    x_TK[5] = 0
    check(x_TK, Fp8Form(weight_NK))


@pytest.mark.usefixtures("triton_path")
def test_rows_are_looked_up_as_they_are_multiplied(dtype):
    _, weight_NK = make(0, 20, 48, dtype)
    form = Fp8Form(weight_NK)
    ids_T = torch.tensor([3, 19, 3])
    wide_NK = form.data.float() * form.scales_N[:, None]
    assert torch.equal(form.rows(ids_T), wide_NK[ids_T].to(dtype))
    assert form.num_bytes == 20 * 48 + 20 * 4


@pytest.mark.gpu
@pytest.mark.usefixtures("on_gpu")
def test_a_packed_layer_multiplies_on_a_gpu():
    x_TK, weight_NK = make(3, 32, 48)
    packed = PackedLinear.pack(weight_NK, "fp8")
    torch.testing.assert_close(
        linear(x_TK, packed), linear(x_TK, PackedLinear.pack(packed.weight_NK())), rtol=2**-6, atol=1e-2
    )


def test_a_cpu_has_no_fp8():
    with pytest.raises(ConfigError, match=r"'fp8', which is for device 'cuda', the device is 'cpu'"):
        PackedLinear.pack(torch.zeros(4, 4), "fp8")
