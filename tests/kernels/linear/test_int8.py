"""Weights in 8 bits, whose inputs are rounded as well, against plain products of the same integers."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ConfigError, ShapeError
from hybrid_engine.kernels.linear import PackedLinear, linear, reference
from hybrid_engine.kernels.linear.int8 import BYTES, WORDS, round_weight

pytestmark = [pytest.mark.usefixtures("path"), on_cpu_paths]
MOST = {"int8": WORDS, "w8a8": BYTES}
each_way = pytest.mark.parametrize("quantization", MOST)
# Of the results' deviation, for float32 results: sums in another order, and what lies between two integers may be
# rounded the other way. For bfloat16 results that much is rounded once more.
TOLERANCE = {"int8": 1e-4, "w8a8": 1e-2}


def make(num_tokens, num_outputs, num_inputs, dtype=torch.float32):
    return torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)


def check(x_TK, weight_NK, quantization, bias_N=None, out_dtype=torch.float32):
    integers_NK, scales_N = round_weight(weight_NK)
    most = MOST[quantization]
    expected = reference.linear_of_integers(x_TK, integers_NK, scales_N, bias_N, most=most, out_dtype=out_dtype)
    got = linear(x_TK, PackedLinear.pack(weight_NK, quantization), bias_N, out_dtype=out_dtype)
    atol = TOLERANCE[quantization] * (expected.float().std().item() if expected.numel() > 1 else 10)
    torch.testing.assert_close(got, expected, atol=atol, rtol=2**-7 if out_dtype == torch.bfloat16 else 1e-5)


@each_way
@pytest.mark.parametrize("num_tokens", [*range(18), 64, 100])
def test_any_number_of_tokens(dtype, num_tokens, quantization):
    check(*make(num_tokens, 200, 96, dtype), quantization, out_dtype=dtype)


@each_way
@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (15, 2), (16, 33), (17, 640), (64, 7), (65, 2048), (130, 31)]
)
def test_any_shape_of_weight(num_outputs, num_inputs, quantization):
    check(*make(9, num_outputs, num_inputs), quantization)


@each_way
def test_a_bias_of_any_float_dtype_is_added(dtype, quantization):
    x_TK, weight_NK = make(5, 70, 64, dtype)
    for bias_N in (torch.randn(70), torch.randn(70).bfloat16()):
        check(x_TK, weight_NK, quantization, bias_N)


@each_way
def test_strided_inputs_and_weights_are_accepted(dtype, quantization):
    x_TK, weight_NK = make(4, 40, 64, dtype)
    wide = torch.zeros(4, 200).to(dtype)
    wide[:, 50:114] = x_TK
    check(wide[:, 50:114], weight_NK.T.contiguous().T, quantization)
    check(x_TK.T.contiguous().T, weight_NK, quantization)


@each_way
def test_a_token_is_the_same_bits_in_any_company(dtype, quantization, path):
    if path == "torch":
        pytest.skip("torch's product may depend on the batch")
    x_TK, weight_NK = make(50, 200, 300, dtype)
    packed = PackedLinear.pack(weight_NK, quantization)
    together = linear(x_TK, packed)
    for size in (1, 2, 3, 7, 17):
        apart = torch.cat([linear(part, packed) for part in x_TK.split(size)])
        assert torch.equal(together, apart)


@each_way
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_spoils_its_own_token_alone(dtype, quantization, value):
    x_TK, weight_NK = make(7, 33, 40, dtype)
    packed = PackedLinear.pack(weight_NK, quantization)
    sound = linear(x_TK, packed)
    x_TK[3, 5] = value
    out_TN = linear(x_TK, packed)
    others = [0, 1, 2, 4, 5, 6]
    assert out_TN[3].isnan().all()
    assert torch.equal(out_TN[others], sound[others])


@each_way
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-35])
def test_rows_of_nothing_or_next_to_it_give_the_bias(quantization, size):
    x_TK, weight_NK = make(3, 20, 24)
    bias_N = torch.randn(20)
    x_TK[1] *= size
    assert torch.equal(linear(x_TK, PackedLinear.pack(weight_NK, quantization), bias_N)[1], bias_N)
    weight_NK[7] *= size
    packed = PackedLinear.pack(weight_NK, quantization)
    assert (linear(x_TK, packed)[:, 7].abs() < 1e-30).all()
    assert (packed.weight_NK()[7] == weight_NK[7] * 0).all() or size > 0


@each_way
@pytest.mark.parametrize("size", [1e-20, 1e20])
def test_the_size_of_inputs_does_not_matter(quantization, size):
    x_TK, weight_NK = make(3, 20, 24)
    packed = PackedLinear.pack(weight_NK, quantization)
    torch.testing.assert_close(linear(x_TK * size, packed) / size, linear(x_TK, packed), rtol=1e-2, atol=0.2)


@each_way
def test_the_largest_integers_do_not_overflow(quantization):
    num_inputs = 16_384
    ones_TK = torch.ones(3, num_inputs) * torch.tensor([1.0, -1.0, 1.0])[:, None]
    weight_NK = torch.ones(17, num_inputs) * torch.tensor([1.0, -1.0] * 8 + [1.0])[:, None]
    expected = ones_TK @ weight_NK.T
    torch.testing.assert_close(linear(ones_TK, PackedLinear.pack(weight_NK, quantization)), expected, rtol=1e-4, atol=0)


@each_way
def test_rows_are_those_that_are_multiplied(dtype, quantization):
    _, weight_NK = make(0, 150, 33, dtype)
    packed = PackedLinear.pack(weight_NK, quantization)
    integers_NK, scales_N = round_weight(weight_NK)
    expected = (integers_NK * scales_N[:, None]).to(dtype)
    ids_T = torch.tensor([149, 0, 17, 17, 64, 127, 128])
    assert torch.equal(packed.rows(ids_T), expected[ids_T])
    assert torch.equal(packed.weight_NK(), expected)
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([150]))


def test_a_weight_takes_an_eighth_of_a_bit_more_than_eight_bits():
    packed = PackedLinear.pack(torch.zeros(256, 640).bfloat16(), "int8")
    assert 256 * 640 < packed.num_bytes <= 256 * 640 * 1.0157


@each_way
def test_how_far_a_product_is_from_that_of_whole_weights(quantization):
    x_TK, weight_NK = make(64, 256, 640)
    exact = x_TK @ weight_NK.T
    error = (linear(x_TK, PackedLinear.pack(weight_NK, quantization)) - exact).std() / exact.std()
    # Even steps of peak / 127 with a peak of about 3.3 deviations: 3.3 / 127 / sqrt(12) = 0.0075, for inputs likewise.
    assert error < {"int8": 0.009, "w8a8": 0.013}[quantization]


@pytest.mark.parametrize(
    ("quantization", "device", "message"),
    [("int3", "cpu", "quantization is 'int3', must be one of"), ("int8", "meta", "is for device 'cpu', the device is")],
)
def test_what_there_is_not_is_refused(quantization, device, message):
    with pytest.raises(ConfigError, match=message):
        PackedLinear.pack(torch.zeros(4, 4, device=device), quantization)


@each_way
def test_inputs_of_another_dtype_are_refused(quantization):
    with pytest.raises(ShapeError, match="must be like what the weight was packed from"):
        linear(torch.zeros(2, 8), PackedLinear.pack(torch.zeros(4, 8).bfloat16(), quantization))
