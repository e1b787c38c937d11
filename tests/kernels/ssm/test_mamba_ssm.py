"""Our recurrent ops against the CUDA and Triton kernels of the mamba-ssm package, which an optional extra brings."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest
import torch
from torch import Tensor

from hybrid_engine.kernels.ssm import StateMeta, causal_conv1d, mamba1_scan, mamba2_scan

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
TOLERANCE = {"rtol": 2e-3, "atol": 2e-3}
"""Their matrix products may round float32 inputs to TF32, with 10 bits; sums have up to 128 terms of about 1."""
NUM_REQUESTS, NUM_TOKENS = 2, 100
EVERY_REQUEST = {"num_queries": [NUM_TOKENS] * NUM_REQUESTS, "slots": [2, 1]}


def theirs(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:  # also where it is installed but was built for another torch
        pytest.skip(f"{name} can't be imported ({error}): pip install 'hybrid-engine[mamba-ssm]'")


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def every_request(has_history: bool) -> StateMeta:
    return StateMeta.build(**EVERY_REQUEST, has_history=[has_history] * NUM_REQUESTS, device=DEVICE)


def single_tokens() -> StateMeta:
    return StateMeta.build(num_queries=[1, 1], slots=[2, 1], has_history=[True, True], device=DEVICE)


def in_slots(states_R: Tensor) -> Tensor:
    """The requests' states in slots 2 and 1; slot 0 is the null slot."""
    return torch.stack([torch.full_like(states_R[0], torch.nan), states_R[1], states_R[0]])


def of_requests(states_S: Tensor) -> Tensor:
    return states_S[[2, 1]]


def test_the_convolution_is_that_of_causal_conv1d():
    other = theirs("causal_conv1d")
    x_RTI, weight_IW, bias_I, state_RIW = normal(2, NUM_TOKENS, 64), normal(64, 4), normal(64), normal(2, 64, 3)
    # Their channels lie next to each other where states are given: x comes as a transposed view.
    wanted_RIT, last_RIW = other.causal_conv1d_fn(
        x_RTI.transpose(1, 2),
        weight_IW,
        bias_I,
        initial_states=state_RIW.transpose(1, 2).contiguous().transpose(1, 2),
        return_final_states=True,
        activation="silu",
    )
    conv_SIW = in_slots(state_RIW)
    got_TI = causal_conv1d(x_RTI.flatten(0, 1), weight_IW, bias_I, conv_SIW=conv_SIW, meta=every_request(True))
    torch.testing.assert_close(got_TI.view_as(x_RTI), wanted_RIT.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(of_requests(conv_SIW), last_RIW, **TOLERANCE)


def mamba1_inputs(num_tokens: int) -> dict[str, Tensor]:
    sizes = {"x_TI": 64, "dt_TI": 64, "z_TI": 64, "B_TN": 16, "C_TN": 16}
    inputs = {name: normal(2, num_tokens, size) for name, size in sizes.items()}
    weights = {"A_IN": -4 * torch.rand(64, 16, device=DEVICE), "D_I": normal(64), "dt_bias_I": normal(64) - 1}
    return inputs | weights


def test_the_scan_of_mamba1_is_theirs():
    other = theirs("mamba_ssm.ops.selective_scan_interface")
    given = mamba1_inputs(NUM_TOKENS)
    x, dt, z, B, C = (given[name].transpose(1, 2) for name in ("x_TI", "dt_TI", "z_TI", "B_TN", "C_TN"))
    wanted_RIT, last_RIN = other.selective_scan_fn(
        *(x, dt, given["A_IN"], B, C, given["D_I"]),
        z=z,
        delta_bias=given["dt_bias_I"],
        delta_softplus=True,
        return_last_state=True,
    )
    state_SIN = in_slots(torch.full((2, 64, 16), torch.nan, device=DEVICE))
    packed = {name: tensor.flatten(0, 1) if "_T" in name else tensor for name, tensor in given.items()}
    got_TI = mamba1_scan(**packed, state_SIN=state_SIN, meta=every_request(False))
    torch.testing.assert_close(got_TI.view(2, NUM_TOKENS, 64), wanted_RIT.transpose(1, 2), **TOLERANCE)
    torch.testing.assert_close(of_requests(state_SIN), last_RIN.float(), **TOLERANCE)


def test_a_single_step_of_mamba1_is_theirs():
    other = theirs("mamba_ssm.ops.triton.selective_state_update")
    given, state_RIN = mamba1_inputs(1), normal(2, 64, 16)
    one = {name: tensor[:, 0] if "_T" in name else tensor for name, tensor in given.items()}
    state_SIN = in_slots(state_RIN)
    wanted_RI = other.selective_state_update(
        *(state_RIN, one["x_TI"], one["dt_TI"], one["A_IN"], one["B_TN"], one["C_TN"]),
        D=one["D_I"],
        z=one["z_TI"],
        dt_bias=one["dt_bias_I"],
        dt_softplus=True,
    )
    got_TI = mamba1_scan(**one, state_SIN=state_SIN, meta=single_tokens())
    torch.testing.assert_close(got_TI, wanted_RI, **TOLERANCE)
    torch.testing.assert_close(of_requests(state_SIN), state_RIN, **TOLERANCE)


def mamba2_inputs(num_tokens: int) -> dict[str, Tensor]:
    shapes = {"x_THD": (8, 64), "dt_TH": (8,), "B_TGN": (2, 128), "C_TGN": (2, 128)}
    inputs = {name: normal(2, num_tokens, *shape) * 0.3 for name, shape in shapes.items()}
    weights = {"A_H": -2 * torch.rand(8, device=DEVICE), "D_H": normal(8), "dt_bias_H": normal(8) - 1}
    return inputs | weights


def test_the_scan_of_mamba2_is_theirs():
    other = theirs("mamba_ssm.ops.triton.ssd_combined")
    given, state_RHDN = mamba2_inputs(NUM_TOKENS), normal(2, 8, 64, 128)
    wanted_RTHD, last_RHDN = other.mamba_chunk_scan_combined(
        *(given["x_THD"], given["dt_TH"], given["A_H"], given["B_TGN"], given["C_TGN"]),
        64,
        D=given["D_H"],
        dt_bias=given["dt_bias_H"],
        initial_states=state_RHDN,
        dt_softplus=True,
        dt_limit=(0.01, 4.0),
        return_final_states=True,
    )
    state_SHDN = in_slots(state_RHDN)
    packed = {name: tensor.flatten(0, 1) if "_T" in name else tensor for name, tensor in given.items()}
    got_THD = mamba2_scan(**packed, dt_limit=(0.01, 4.0), state_SHDN=state_SHDN, meta=every_request(True))
    torch.testing.assert_close(got_THD.view_as(wanted_RTHD), wanted_RTHD, **TOLERANCE)
    torch.testing.assert_close(of_requests(state_SHDN), last_RHDN.float(), **TOLERANCE)


def test_a_single_step_of_mamba2_is_theirs():
    other = theirs("mamba_ssm.ops.triton.selective_state_update")
    given, state_RHDN = mamba2_inputs(1), normal(2, 8, 64, 128)
    one = {name: tensor[:, 0] if "_T" in name else tensor for name, tensor in given.items()}
    state_SHDN = in_slots(state_RHDN)
    # Theirs has a time step, a decay and a bias for every channel; here all channels of a head share them.
    wanted_RHD = other.selective_state_update(
        *(state_RHDN, one["x_THD"], one["dt_TH"][:, :, None].expand(-1, -1, 64)),
        one["A_H"][:, None, None].expand(-1, 64, 128),
        *(one["B_TGN"], one["C_TGN"]),
        D=one["D_H"][:, None].expand(-1, 64),
        dt_bias=one["dt_bias_H"][:, None].expand(-1, 64),
        dt_softplus=True,
    )
    got_THD = mamba2_scan(**one, state_SHDN=state_SHDN, meta=single_tokens())
    torch.testing.assert_close(got_THD, wanted_RHD, **TOLERANCE)
    torch.testing.assert_close(of_requests(state_SHDN), state_RHDN, **TOLERANCE)
