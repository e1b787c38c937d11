"""What is to be shown in a process that computes by AMX, the processor's or emulated; test_amx.py starts them."""

import ctypes
import mmap
from contextlib import contextmanager

import pytest
import torch

from hybrid_engine.kernels.linear import PackedLinear, cpu, linear
from hybrid_engine.kernels.native import NativeLibrary

ROWS = [*range(1, 20), 31, 32, 33, 47, 48, 49, 65]


@pytest.fixture
def plain(monkeypatch):
    """Products by the library for AVX-512, which lies beside ours in this process."""
    assert cpu.library.load() is not None
    monkeypatch.setenv("HYBRID_ENGINE_MARCH", "native -mno-amx-bf16")
    other = NativeLibrary(cpu.library._package, cpu.library._functions)

    def run(x_TK, packed, **options):
        with monkeypatch.context() as patch:
            patch.setattr(cpu, "library", other)
            with emulated(False):
                return linear(x_TK, packed, **options)

    return run


@contextmanager
def emulated(is_amx):
    """Check that a block computes by AMX, or not, which the emulator counts."""
    count = getattr(ctypes.CDLL(None), "amx_products", None)
    if count is None:  # the processor's own
        yield
        return
    count.restype = ctypes.c_int64
    before = count()
    yield
    assert (count() > before) is is_amx


def next_to_nothing(tensor):
    """A copy that ends where memory ends."""
    page = mmap.PAGESIZE
    size = tensor.numel() * tensor.itemsize
    whole = (size + page - 1) // page * page
    memory = mmap.mmap(-1, whole + page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + whole), ctypes.c_size_t(page), 0) == 0
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=whole - size)
    return copy.view(tensor.shape).copy_(tensor)


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (40, 64), (64, 63), (130, 200)])
def test_integers_give_the_same_bits_as_without(plain, quantization, num_outputs, num_inputs):
    packed = PackedLinear.pack(torch.randn(num_outputs, num_inputs), quantization)
    for rows in ROWS:
        x_TK, bias_N = torch.randn(rows, num_inputs), torch.randn(num_outputs)
        with emulated(True):
            got = linear(x_TK, packed, bias_N)
        assert torch.equal(got, plain(x_TK, packed, bias_N=bias_N))


@pytest.mark.parametrize(("num_outputs", "num_inputs"), [(1, 1), (20, 64), (64, 62), (150, 107)])
def test_sums_are_added_up_in_the_order_that_is_written(num_outputs, num_inputs):
    weight_NK, bias_N = torch.randn(num_outputs, num_inputs).bfloat16(), torch.randn(num_outputs)
    packed = PackedLinear.pack(weight_NK)
    for rows in ROWS:
        x_TK = torch.randn(rows, num_inputs).bfloat16()
        products_TNK = x_TK[:, None].double() * weight_NK.double()
        wanted = bias_N.expand(rows, -1)
        for part_TNK in products_TNK.split(32, dim=2):
            sums = torch.zeros(2, rows, num_outputs)
            for k in range(part_TNK.shape[2]):
                sums[k % 2] = (sums[k % 2] + part_TNK[:, :, k]).float()
            wanted = wanted + (sums[0] + sums[1])
        assert torch.equal(linear(x_TK, packed, bias_N, out_dtype=torch.float32), wanted)


@pytest.mark.parametrize(("rows", "num_outputs", "num_inputs"), [(1, 16, 2), (3, 64, 70), (17, 20, 34), (32, 80, 64)])
def test_nothing_is_read_beyond_the_end(rows, num_outputs, num_inputs):
    x_TK, weight_NK = torch.randn(rows, num_inputs).bfloat16(), torch.randn(num_outputs, num_inputs).bfloat16()
    packed = PackedLinear.pack(weight_NK)
    wanted = linear(x_TK, packed)
    packed.form.data = next_to_nothing(packed.form.data)
    assert torch.equal(linear(next_to_nothing(x_TK), packed), wanted)
