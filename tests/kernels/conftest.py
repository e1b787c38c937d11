"""Every op is tested on each of its paths: C++, torch alone, Triton in its interpreter, Triton on a GPU."""

import pytest
import torch
from amx import amx_emulator, emulated_amx  # noqa: F401 (fixtures)

from hybrid_engine.kernels.native import NativeLibrary
from hybrid_engine.kernels.native.builder import find_compiler

PATHS = [
    "native",
    "torch",
    pytest.param("triton", marks=pytest.mark.slow),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.fixture(params=PATHS)
def path(request, monkeypatch):
    """Run the test once on each path; its name."""
    if request.param == "torch":
        monkeypatch.setattr(NativeLibrary, "load", lambda library: None)
    elif request.param == "triton":
        request.getfixturevalue("interpreted")
    elif request.param == "cuda":
        request.getfixturevalue("on_gpu")
    elif find_compiler() is None:
        pytest.skip("no C++ compiler here")
    return request.param


@pytest.fixture(autouse=True)
def _same_numbers_every_time():
    torch.manual_seed(0)


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def dtype(request):
    return request.param
