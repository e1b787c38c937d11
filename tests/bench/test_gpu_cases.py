"""Every case of the table of GPU ops equals its reference on a GPU."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.bench.gpu_cases import Case, cases

pytestmark = pytest.mark.gpu

CASES = [pytest.param(case, dtype, id=f"{case.name}, {dtype}") for case in cases() for dtype in case.dtypes]
# By the norm of the difference. float32: sums in another order. bfloat16: results are rounded to 8 bits, weights of
# the softmax and what the scans compute on the way to 8 and 11.
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def relative_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    got, wanted = got.double(), wanted.double()
    return float((got - wanted).norm() / wanted.norm())


@pytest.mark.parametrize(("case", "dtype"), CASES)
def test_an_op_equals_its_reference(case: Case, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    work = case.make(torch.device("cuda"), dtype)
    assert work.reference is not None
    got, wanted = work.run(), work.reference()
    pairs = zip(got, wanted, strict=True) if isinstance(got, tuple) else [(got, wanted)]
    for ours, theirs in pairs:
        assert relative_error(ours, theirs) < LARGEST_ERROR[dtype]
