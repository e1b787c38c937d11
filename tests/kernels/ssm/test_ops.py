"""What each recurrent op has of its own: widths, sizes, limits, extremes, and what it refuses."""

import math

import pytest
import torch
from kernel_paths import on_cpu_paths
from torch.nn import functional as F

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.ssm import StateMeta, causal_conv1d, mamba1_scan, mamba2_scan

pytestmark = pytest.mark.usefixtures("path")


def two_requests() -> StateMeta:
    return StateMeta.build(
        num_queries=[7, 12], slots=[3, 1], has_history=[True, False], captures=[(0, 1, 2), (1, 9, 4), (1, 12, 5)]
    )


@pytest.mark.parametrize("width", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("channels", [1, 16, 33])
def test_a_convolution_of_any_width(make_any_conv, width, channels):
    op = make_any_conv(19, width=width, channels=channels)
    op.check(op.slots(6, [3]), two_requests())


def test_a_convolution_is_that_of_torch(make_any_conv):
    op = make_any_conv(21)
    got = op.run(op.slots(2), StateMeta.build(num_queries=[21], slots=[1], has_history=[False]))
    padded = F.pad(op.tokens["x_TI"].T, (3, 0))[None]
    wanted = F.silu(F.conv1d(padded, op.weights["weight_IW"][:, None], op.weights["bias_I"], groups=37))[0].T
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_the_conv_state_is_the_inputs_before_the_next_token(make_any_conv, dtype):
    op = make_any_conv(10, dtype)
    states = op.slots(3)
    op.run(states, StateMeta.build(num_queries=[10], slots=[1], has_history=[False], captures=[(0, 2, 2)]))
    x_TI = op.tokens["x_TI"]
    assert torch.equal(states[1], x_TI[7:].T)
    assert torch.equal(states[2], torch.cat([torch.zeros_like(x_TI[:1]), x_TI[:2]]).T)


@pytest.mark.parametrize("num_states", [1, 15, 16, 17, 64, 257])
@pytest.mark.parametrize("channels", [1, 16, 33])
def test_mamba1_of_any_size(make_any_mamba1, num_states, channels):
    op = make_any_mamba1(19, num_states=num_states, channels=channels)
    op.check(op.slots(6, [3]), two_requests())


@pytest.mark.parametrize("num_states", [1, 16, 72, 128, 160])
@pytest.mark.parametrize(("heads", "groups", "size"), [(1, 1, 1), (4, 1, 16), (4, 4, 33), (6, 3, 64)])
def test_mamba2_of_any_size(make_any_mamba2, num_states, heads, groups, size):
    op = make_any_mamba2(19, heads=heads, groups=groups, size=size, num_states=num_states)
    op.check(op.slots(6, [3]), two_requests())


@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_the_chunk_changes_nothing(make_any_mamba2, chunk):
    op = make_any_mamba2(19, chunk=chunk)
    op.check(op.slots(6, [3]), two_requests())


@pytest.mark.parametrize("dt_limit", [(0.0, math.inf), (0.5, 0.6), (0.0, 0.001)])
def test_step_sizes_are_cut_to_their_limits(make_any_mamba2, dt_limit):
    op = make_any_mamba2(19, dt_limit=dt_limit)
    op.check(op.slots(6, [3]), two_requests())


def test_mamba1_and_mamba2_agree_where_they_are_the_same(make_any_mamba2):
    """One head of one row with one decay for all states is a channel of Mamba-1."""
    op = make_any_mamba2(19, heads=3, groups=1, size=1, num_states=16, dt_limit=(0.0, math.inf))
    x, dt, B, C = (op.tokens[name] for name in ("x_THD", "dt_TH", "B_TGN", "C_TGN"))
    weights = op.weights
    states, meta = torch.zeros(6, 3, 16), two_requests()
    got = mamba1_scan(
        x[:, :, 0],
        dt,
        A_IN=weights["A_H"][:, None].repeat(1, 16),
        B_TN=B[:, 0],
        C_TN=C[:, 0],
        D_I=weights["D_H"],
        dt_bias_I=weights["dt_bias_H"],
        state_SIN=states,
        meta=meta,
    )
    wanted = op.run(wanted_states := torch.zeros(6, 3, 1, 16), meta)
    torch.testing.assert_close(got, wanted[:, :, 0], rtol=1e-5, atol=5e-5)
    torch.testing.assert_close(states, wanted_states[:, :, 0], rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("shift", [-60.0, 30.0, 90.0])
def test_step_sizes_far_from_one_stay_finite(make_any_mamba1, make_any_mamba2, shift):
    """Decays of exactly one, and of less than float32 can tell from zero."""
    for op, name in ((make_any_mamba1(19), "dt_TI"), (make_any_mamba2(19, dt_limit=(0.0, math.inf)), "dt_TH")):
        op.tokens[name] += shift
        states = op.slots(6, [3])
        op.check(states, two_requests())
        assert states[1:].isfinite().all()


def test_mamba2_remembers_over_strong_decays_between_weak_ones(make_any_mamba2):
    """Sums of decays grow large inside a piece while neighbours differ by little."""
    op = make_any_mamba2(150, chunk=64, dt_limit=(0.0, math.inf))
    op.tokens["dt_TH"][::7] += 40
    op.check(op.slots(3, [1]), StateMeta.build(num_queries=[150], slots=[1], has_history=[True]))


META = StateMeta.build(num_queries=[4], slots=[1], has_history=[True])


def conv(**changes):
    options = {"weight_IW": torch.zeros(6, 3), "bias_I": torch.zeros(6), "conv_SIW": torch.zeros(2, 6, 2)} | changes
    return causal_conv1d(options.pop("x_TI", torch.zeros(4, 6)), **options, meta=META)


def mamba1(**changes):
    options = {
        "x_TI": torch.zeros(4, 6),
        "dt_TI": torch.zeros(4, 6),
        "A_IN": torch.zeros(6, 2),
        "B_TN": torch.zeros(4, 2),
        "C_TN": torch.zeros(4, 2),
        "D_I": torch.zeros(6),
        "state_SIN": torch.zeros(2, 6, 2),
    }
    return mamba1_scan(**options | changes, meta=META)


def mamba2(**changes):
    options = {
        "x_THD": torch.zeros(4, 6, 5),
        "dt_TH": torch.zeros(4, 6),
        "A_H": torch.zeros(6),
        "B_TGN": torch.zeros(4, 3, 2),
        "C_TGN": torch.zeros(4, 3, 2),
        "D_H": torch.zeros(6),
        "state_SHDN": torch.zeros(2, 6, 5, 2),
    }
    return mamba2_scan(**options | changes, meta=META)


@pytest.mark.parametrize(
    ("call", "changes", "message"),
    [
        (conv, {"x_TI": torch.zeros(4, 6, dtype=torch.float16)}, "x_TI is float16"),
        (conv, {"weight_IW": torch.zeros(5, 3)}, "weight_IW has shape"),
        (conv, {"bias_I": torch.zeros(5)}, "bias_I has shape"),
        (conv, {"conv_SIW": torch.zeros(2, 6, 3)}, "conv_SIW has shape"),
        (conv, {"conv_SIW": torch.zeros(2, 6, 2).half()}, "conv_SIW is float16"),
        (conv, {"activation": "relu"}, "activation is 'relu'"),
        (mamba1, {"dt_TI": torch.zeros(4, 5)}, "dt_TI has shape"),
        (mamba1, {"A_IN": torch.zeros(5, 2)}, "A_IN has shape"),
        (mamba1, {"B_TN": torch.zeros(4, 3)}, "B_TN has shape"),
        (mamba1, {"C_TN": torch.zeros(3, 2)}, "C_TN has shape"),
        (mamba1, {"D_I": torch.zeros(5)}, "D_I has shape"),
        (mamba1, {"z_TI": torch.zeros(4, 5)}, "z_TI has shape"),
        (mamba1, {"z_TI": torch.zeros(4, 6).half()}, "z_TI is float16"),
        (mamba1, {"dt_bias_I": torch.zeros(5)}, "dt_bias_I has shape"),
        (mamba1, {"state_SIN": torch.zeros(2, 6, 3)}, "state_SIN has shape"),
        (mamba1, {"state_SIN": torch.zeros(2, 6, 2).bfloat16()}, "state_SIN is bfloat16"),
        (mamba1, {"dt_TI": torch.zeros(4, 6).half()}, "dt_TI is float16"),
        (mamba2, {"dt_TH": torch.zeros(4, 5)}, "dt_TH has shape"),
        (mamba2, {"A_H": torch.zeros(5)}, "A_H has shape"),
        (mamba2, {"B_TGN": torch.zeros(3, 3, 2)}, "B_TGN has shape"),
        (mamba2, {"C_TGN": torch.zeros(4, 2, 2)}, "C_TGN has shape"),
        (mamba2, {"D_H": torch.zeros(5)}, "D_H has shape"),
        (mamba2, {"dt_bias_H": torch.zeros(5)}, "dt_bias_H has shape"),
        (mamba2, {"state_SHDN": torch.zeros(2, 6, 5, 3)}, "state_SHDN has shape"),
        (mamba2, {"state_SHDN": torch.zeros(2, 6, 5, 2).bfloat16()}, "state_SHDN is bfloat16"),
        (mamba2, {"B_TGN": torch.zeros(4, 4, 2), "C_TGN": torch.zeros(4, 4, 2)}, "6 heads can't share 4 groups"),
        (mamba2, {"chunk": 0}, "chunk is 0"),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(call, changes, message):
    call()
    with pytest.raises(ShapeError, match=message):
        call(**changes)
