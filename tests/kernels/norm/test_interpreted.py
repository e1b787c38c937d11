"""Triton's norms in its interpreter, quickly; the slow tests run all of the other file on it too."""

import pytest
import torch

from hybrid_engine.kernels.norm import norm_add_norm, reference, rms_norm

pytestmark = pytest.mark.usefixtures("interpreted")

OPTIONS = {"eps": 1e-6, "zero_centered": True}


@pytest.mark.parametrize("size", [1, 17, 1000])
def test_rows_of_any_width(size):
    x_TE, residual_TE = torch.randn(5, size), torch.randn(5, size)
    weights = {"post_weight_E": torch.randn(size), "pre_weight_E": torch.randn(size)}
    got = norm_add_norm(x_TE, residual_TE, **weights, **OPTIONS)
    torch.testing.assert_close(got, reference.norm_add_norm(x_TE, residual_TE, **weights, **OPTIONS))


def test_a_slice_of_columns_in_bfloat16():
    wide, weight_E = torch.randn(4, 100).bfloat16(), torch.randn(32)
    wanted = reference.rms_norm(wide[:, 10:42], weight_E, **OPTIONS)
    torch.testing.assert_close(rms_norm(wide[:, 10:42], weight_E, **OPTIONS), wanted, rtol=2**-7, atol=1e-3)
