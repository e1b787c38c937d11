"""Packed linear layers against a plain product in float32."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.activation import act_mul
from hybrid_engine.kernels.linear import PackedLinear, linear, linear_gated, reference

pytestmark = pytest.mark.usefixtures("path")


@pytest.fixture
def interpreted():
    pytest.skip("these layers go through cuBLAS on a GPU: there is nothing for Triton's interpreter")


# Sums of up to 2,048 products of unit normals: float32 rounding in another order, or one rounding to bfloat16.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-3}, torch.bfloat16: {"rtol": 2**-7, "atol": 2e-2}}


def make(num_tokens, num_outputs, num_inputs, dtype):
    return torch.randn(num_tokens, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)


@pytest.mark.parametrize("num_tokens", [0, 1, 2, 3, 4, 5, 6, 7, 8, 13, 64, 100])
def test_any_number_of_tokens(dtype, num_tokens):
    x_TK, weight_NK = make(num_tokens, 200, 96, dtype)
    expected = reference.linear(x_TK, weight_NK, None, out_dtype=dtype)
    torch.testing.assert_close(linear(x_TK, PackedLinear.pack(weight_NK)), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (15, 2), (16, 33), (17, 640), (64, 7), (65, 2048)])
def test_any_shape_of_weight(dtype, num_outputs, num_inputs):
    x_TK, weight_NK = make(9, num_outputs, num_inputs, dtype)
    expected = reference.linear(x_TK, weight_NK, None, out_dtype=dtype)
    torch.testing.assert_close(linear(x_TK, PackedLinear.pack(weight_NK)), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("num_outputs", [70, 128])
def test_a_bias_of_any_float_dtype_is_added(dtype, num_outputs):
    x_TK, weight_NK = make(5, num_outputs, 64, dtype)
    for bias_N in (torch.randn(num_outputs), torch.randn(num_outputs).bfloat16()):
        expected = reference.linear(x_TK, weight_NK, bias_N, out_dtype=dtype)
        torch.testing.assert_close(linear(x_TK, PackedLinear.pack(weight_NK), bias_N), expected, **TOLERANCE[dtype])


def test_float32_results_of_bfloat16_weights_lose_nothing(path):
    x_TK, weight_NK = make(3, 100, 64, torch.bfloat16)
    got = linear(x_TK, PackedLinear.pack(weight_NK), out_dtype=torch.float32)
    assert got.dtype == torch.float32
    tolerance = TOLERANCE[torch.bfloat16 if path == "torch" else torch.float32]
    torch.testing.assert_close(got, x_TK.float() @ weight_NK.float().T, **tolerance)


def test_rows_are_the_weights_rows(dtype):
    _, weight_NK = make(0, 150, 33, dtype)
    ids_T = torch.tensor([149, 0, 17, 17, 64, 127, 128])
    packed = PackedLinear.pack(weight_NK)
    assert torch.equal(packed.rows(ids_T), weight_NK[ids_T])
    assert torch.equal(packed.weight_NK(), weight_NK)


@pytest.mark.parametrize("token_id", [-1, 150])
@on_cpu_paths
def test_a_row_that_does_not_exist_is_an_error(dtype, token_id):
    packed = PackedLinear.pack(torch.zeros(150, 8, dtype=dtype))
    with pytest.raises(IndexError):
        packed.rows(torch.tensor([0, token_id]))


def test_strided_inputs_and_weights_are_accepted(dtype):
    x_TK, weight_NK = make(4, 40, 64, dtype)
    wide = torch.zeros(4, 200).to(dtype)
    wide[:, 50:114] = x_TK
    transposed = weight_NK.T.contiguous().T
    expected = reference.linear(x_TK, weight_NK, None, out_dtype=dtype)
    packed = PackedLinear.pack(transposed)
    torch.testing.assert_close(linear(wide[:, 50:114], packed), expected, **TOLERANCE[dtype])
    torch.testing.assert_close(linear(x_TK.T.contiguous().T, packed), expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("num_inputs", [300, 33])
def test_a_token_is_the_same_bits_in_any_company(dtype, num_inputs, path):
    if path != "native":
        pytest.skip("torch's product may depend on the batch")
    x_TK, weight_NK = make(50, 200, num_inputs, dtype)
    packed = PackedLinear.pack(weight_NK)
    together = linear(x_TK, packed)
    for size in (1, 2, 3, 7, 17):
        apart = torch.cat([linear(part, packed) for part in x_TK.split(size)])
        assert torch.equal(together, apart)


@pytest.mark.parametrize("num_tokens", [1, 5, 49])
def test_the_number_of_threads_changes_no_bit(dtype, num_tokens, path):
    if path != "native":
        pytest.skip("torch's product may depend on it")
    x_TK, weight_NK = make(num_tokens, 500, 300, dtype)
    packed, before = PackedLinear.pack(weight_NK), torch.get_num_threads()
    outs = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        outs.append(linear(x_TK, packed))
    torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(outs[0], outs[2])


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize(("num_tokens", "num_outputs", "num_inputs"), [(1, 128, 40), (7, 256, 33), (70, 384, 64)])
def test_a_gate_in_one_pass_has_the_bits_of_two(dtype, kind, num_tokens, num_outputs, num_inputs):
    x_TK, weight_NK = make(num_tokens, num_outputs, num_inputs, dtype)
    packed, bias_N = PackedLinear.pack(weight_NK), torch.randn(num_outputs)
    for bias in (None, bias_N):
        expected = act_mul(linear(x_TK, packed, bias), kind=kind)
        assert torch.equal(linear_gated(x_TK, packed, bias, kind=kind), expected)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_gate_of_any_weight_is_two_ops_together(dtype, quantization):
    x_TK, weight_NK = make(5, 90, 40, dtype)
    packed = PackedLinear.pack(weight_NK, quantization)
    expected = act_mul(linear(x_TK, packed), kind="silu")
    assert torch.equal(linear_gated(x_TK, packed, kind="silu"), expected)


def test_a_packed_weight_takes_no_more_memory_than_the_plain_one(dtype):
    assert PackedLinear.pack(torch.zeros(256, 64, dtype=dtype)).num_bytes == 256 * 64 * dtype.itemsize


def test_nan_inputs_spoil_their_own_token_alone():
    x_TK, weight_NK = make(7, 33, 40, torch.bfloat16)
    x_TK[3, 5] = torch.nan
    out_TN = linear(x_TK, PackedLinear.pack(weight_NK))
    assert out_TN[3].isnan().all()
    assert not out_TN[[0, 1, 2, 4, 5, 6]].isnan().any()


@pytest.mark.parametrize(
    ("x_TK", "bias_N", "message"),
    [
        (torch.zeros(2, 9), None, "x_TK has shape"),
        (torch.zeros(8), None, "x_TK has shape"),
        (torch.zeros(2, 8).bfloat16(), None, "x_TK is"),
        (torch.zeros(2, 8), torch.zeros(5), "bias_N has shape"),
    ],
)
@on_cpu_paths
def test_inputs_that_do_not_fit_are_refused(x_TK, bias_N, message):
    with pytest.raises(ShapeError, match=message):
        linear(x_TK, PackedLinear.pack(torch.zeros(4, 8)), bias_N)


@pytest.mark.parametrize("weight", [torch.zeros(4), torch.zeros(4, 4).half()])
@on_cpu_paths
def test_weights_that_do_not_fit_are_refused(weight):
    with pytest.raises(ShapeError, match="weight_NK"):
        PackedLinear.pack(weight)
