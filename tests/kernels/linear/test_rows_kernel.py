"""The product of an exact GPU path, in Triton's interpreter."""

import os

import pytest
import torch

from hybrid_engine.kernels.linear import reference

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-4}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-2}}


@pytest.fixture
def linear():
    pytest.importorskip("triton", reason="Triton isn't installed: there is none for this system")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("a GPU is here, for which Triton compiles: `bench gpu` runs it there")
    from triton_interpreter import mend

    from hybrid_engine.kernels.linear import gpu

    mend()
    return gpu.linear


@pytest.mark.parametrize(("num_rows", "num_outputs", "num_inputs"), [(1, 70, 33), (67, 5, 100), (3, 64, 64)])
def test_it_is_that_of_the_reference(linear, dtype, num_rows, num_outputs, num_inputs):
    x_TK, weight_NK = torch.randn(num_rows, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype)
    for bias_N, out_dtype in ((None, torch.float32), (torch.randn(num_outputs), dtype)):
        got = linear(x_TK, weight_NK, bias_N, out_dtype=out_dtype, is_exact=True)
        wanted = reference.linear(x_TK, weight_NK, bias_N, out_dtype=out_dtype)
        torch.testing.assert_close(got, wanted, **TOLERANCE[dtype])


def test_a_row_is_the_same_alone(linear, dtype):
    x_TK, weight_NK = torch.randn(70, 100).to(dtype), torch.randn(80, 100).to(dtype)
    together = linear(x_TK, weight_NK, None, out_dtype=torch.float32, is_exact=True)
    for row in (0, 5, 63, 64, 69):
        alone = linear(x_TK[row : row + 1], weight_NK, None, out_dtype=torch.float32, is_exact=True)
        assert torch.equal(alone[0], together[row])
