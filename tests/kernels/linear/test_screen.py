"""The highest output found by a screen is the one that all outputs, computed, would show."""

import pytest
import torch

from hybrid_engine.kernels.linear import PackedLinear, Screen, can_screen, linear
from hybrid_engine.kernels.native import NativeLibrary

pytestmark = [pytest.mark.usefixtures("path"), pytest.mark.parametrize("path", ["native"], indirect=True)]


@pytest.fixture
def set_num_threads():
    """Torch's function; what it set is undone."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def expected(x_TK, packed, divisor=1.0):
    return (linear(x_TK, packed, out_dtype=torch.float32) / divisor).argmax(1)


def check(x_TK, weight_NK, divisor=1.0):
    packed = PackedLinear.pack(weight_NK)
    found_T = Screen(packed).highest(x_TK, divisor=divisor)
    assert found_T is not None, "too many candidates"
    assert found_T.tolist() == expected(x_TK, packed, divisor).tolist()


@pytest.mark.parametrize("num_tokens", [*range(10), 16, 17, 47, 48, 49, 100])
def test_any_number_of_tokens(dtype, num_tokens):
    check(torch.randn(num_tokens, 96).to(dtype), torch.randn(200, 96).to(dtype))


@pytest.mark.parametrize(
    ("num_outputs", "num_inputs"), [(1, 1), (15, 2), (16, 33), (17, 640), (64, 7), (65, 2048), (130, 31), (1000, 64)]
)
def test_any_shape_of_weight(dtype, num_outputs, num_inputs):
    check(torch.randn(9, num_inputs).to(dtype), torch.randn(num_outputs, num_inputs).to(dtype))


@pytest.mark.parametrize("seed", range(20))
def test_outputs_that_are_close_to_each_other(dtype, seed):
    """Rows that differ by less than 8 bits can tell; some are equal, where the first one counts."""
    torch.manual_seed(seed)
    base_K = torch.randn(128)
    weight_NK = (base_K + torch.randn(500, 128) * 2.0 ** -torch.randint(2, 14, (500, 1))).to(dtype)
    weight_NK[torch.randint(500, (100,))] = weight_NK[torch.randint(500, (100,))]
    check(torch.cat([base_K + torch.randn(7, 128) * 0.1, -base_K + torch.randn(6, 128)]).to(dtype), weight_NK)


def test_what_8_bits_of_a_weight_lose_may_decide(dtype):
    """Before an input of 0 half of the outputs have an element so large that 8 bits keep nothing of the others."""
    x_TK, weight_NK = torch.randn(8, 31).sign(), torch.randn(2000, 31)  # an odd number: nothing is turned
    weight_NK[::2] = weight_NK[::2].sign() / 2
    weight_NK[1::2, 0], x_TK[:, 0] = 1000, 0
    check(x_TK.to(dtype), weight_NK.to(dtype))


def test_what_8_bits_of_an_input_lose_may_decide(dtype):
    """An element so large that 8 bits keep nothing of the others lifts half of the outputs, and not far enough."""
    x_TK, weight_NK = torch.randn(8, 31), torch.randn(2000, 31).sign()
    weight_NK[::2] = 0.01
    weight_NK[1::2, 0], x_TK[:, 0] = 0, 1000
    check(x_TK.to(dtype), weight_NK.to(dtype))


@pytest.mark.parametrize("seed", range(5))
def test_elements_that_stand_out(dtype, seed):
    torch.manual_seed(seed)
    x_TK, weight_NK = torch.randn(8, 192), torch.randn(400, 192)
    x_TK[:, torch.randint(192, (3,))] *= 1000
    weight_NK[:, torch.randint(192, (3,))] *= 300
    weight_NK[torch.randint(400, (30,))] *= 1e-6
    check(x_TK.to(dtype), weight_NK.to(dtype))


@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e-12, 1e12, 1e18])
def test_tiny_and_large_numbers(dtype, scale):
    check((torch.randn(5, 64) * scale).to(dtype), torch.randn(70, 64).to(dtype))


def test_all_outputs_below_zero():
    """What fills the last tile up is no output: its zeros would be the highest."""
    x_TK = torch.rand(3, 64) + 0.5
    check(x_TK, -torch.rand(70, 64) - 0.5)


def test_outputs_that_a_divisor_makes_equal():
    """The first one counts, even where another is a little higher before."""
    torch.manual_seed(0)
    weight_NK = torch.ones(3000, 16) + torch.randint(0, 3, (3000, 16)) * 2.0**-22
    x_TK, packed = torch.rand(50, 16) + 1, PackedLinear.pack(weight_NK)
    assert (expected(x_TK, packed) != expected(x_TK, packed, 3.0)).any()
    check(x_TK[:12], weight_NK, 3.0)


def test_strided_inputs():
    wide = torch.randn(6, 200)
    check(wide[:, 50:114], torch.randn(90, 64))
    check(torch.randn(64, 6).T, torch.randn(90, 64))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_is_told_of_its_own_token_alone(dtype, value):
    x_TK, packed = torch.randn(7, 40).to(dtype), PackedLinear.pack(torch.randn(33, 40).to(dtype))
    screen = Screen(packed)
    wanted_T = screen.highest(x_TK)
    x_TK[3, 5] = value
    wanted_T[3] = -1
    assert screen.highest(x_TK).tolist() == wanted_T.tolist()


def test_outputs_that_overflow_are_not_finite():
    packed = PackedLinear.pack(torch.full((20, 16), 1e30))
    assert Screen(packed).highest(torch.full((1, 16), 1e30)).tolist() == [-1]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_weights_that_are_not_finite_have_no_usable_screen(dtype, value):
    weight_NK = torch.randn(33, 40).to(dtype)
    assert Screen(PackedLinear.pack(weight_NK)).is_usable
    weight_NK[32, 7] = value
    assert not Screen(PackedLinear.pack(weight_NK)).is_usable


def test_where_all_outputs_are_close_nothing_is_found_and_less_and_less_tried(set_num_threads):
    set_num_threads(1)  # of several, one may list all others' outputs before another comes to the highest
    weight_NK = torch.zeros(70_000, 16)
    weight_NK[:, 0] = 1
    weight_NK[41_234, 1] = 1
    screen = Screen(PackedLinear.pack(weight_NK))
    flat_TK, peaked_TK = torch.eye(16)[:1], torch.eye(16)[1:2]
    assert screen.highest(peaked_TK).tolist() == [41_234]
    assert all(screen.highest(flat_TK) is None for _ in range(200))
    tries = [screen.highest(peaked_TK) for _ in range(64)]
    first = next(index for index, found in enumerate(tries) if found is not None)
    assert all(found is not None for found in tries[first:])


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_any_number_of_threads_finds_the_same(num_threads, set_num_threads):
    x_TK, packed = torch.randn(16, 128), PackedLinear.pack(torch.randn(5000, 128))
    set_num_threads(num_threads)
    screen = Screen(packed)
    for _ in range(20):
        assert screen.highest(x_TK).tolist() == expected(x_TK, packed).tolist()


def test_a_screen_takes_a_little_more_than_a_byte_a_weight():
    packed = PackedLinear.pack(torch.randn(2048, 640).bfloat16())
    assert packed.num_bytes / 2 <= Screen(packed).num_bytes <= packed.num_bytes / 2 * 1.05


@pytest.mark.parametrize("quantization", ["int8", "w8a8"])
def test_weights_in_8_bits_have_none(quantization):
    assert not can_screen(PackedLinear.pack(torch.randn(64, 64), quantization))


def test_where_there_is_no_compiler_there_are_none(monkeypatch):
    monkeypatch.setattr(NativeLibrary, "load", lambda library: None)
    assert not can_screen(PackedLinear.pack(torch.randn(64, 64)))
