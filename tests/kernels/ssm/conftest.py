"""The recurrent ops behind one face, so that what holds for states is tested for each of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from hybrid_engine.kernels import ssm
from hybrid_engine.kernels.ssm import StateMeta, reference

FLOAT32 = {"rtol": 1e-5, "atol": 5e-5}
"""float32 against float64: sums of up to 160 products of about 1, over states that remember dozens of tokens."""
TOLERANCE = {torch.float32: FLOAT32, torch.bfloat16: {"rtol": 2**-7, "atol": 5e-5}}
"""Of outputs. bfloat16: computed in float32 and rounded once to 8 bits; a value on a tie may fall to either side."""


@dataclass
class Op:
    """One op with random weights, and the inputs of some tokens."""

    name: str
    tokens: dict[str, Tensor]
    """Inputs with a row for each token; the first two are positional where the op has two."""
    weights: dict[str, Any]
    state_name: str
    state_shape: tuple[int, ...]
    state_dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)
    """What only the public function has a default for."""

    def slots(self, num_slots: int, filled: Sequence[int] = ()) -> Tensor:
        """A cache whose slots are all NaN but the filled ones."""
        states = torch.full((num_slots, *self.state_shape), torch.nan, dtype=self.state_dtype)
        for slot in filled:
            states[slot] = torch.randn(self.state_shape).to(self.state_dtype)
        return states

    def run(self, states: Tensor, meta: StateMeta, *, tokens: slice = slice(None), module: Any = ssm) -> Tensor:
        inputs = {name: tensor[tokens] for name, tensor in self.tokens.items()}
        options = self.options if module is reference else {}
        call = getattr(module, self.name)
        return call(**inputs, **self.weights, **{self.state_name: states}, meta=meta, **options)

    def state_after(self, num_tokens: int, before: Tensor | None, first: int = 0) -> Tensor:
        """S(num_tokens) by the reference, of the tokens from `first` on and nothing else."""
        states = self.slots(2)
        if before is not None:
            states[1] = before
        meta = StateMeta.build(num_queries=[num_tokens], slots=[1], has_history=[before is not None])
        self.run(states, meta, tokens=slice(first, first + num_tokens), module=reference)
        return states[1]

    def check(self, states: Tensor, meta: StateMeta) -> None:
        """Outputs and every slot of the cache come out as with the reference; nobody else's slot is touched."""
        wanted_states = states.clone()
        wanted = self.run(wanted_states, meta, module=reference)
        got = self.run(states, meta)
        torch.testing.assert_close(got, wanted, **TOLERANCE[got.dtype])
        torch.testing.assert_close(states, wanted_states, **FLOAT32, equal_nan=True)


def make_conv(num_tokens, dtype=torch.float32, *, channels=37, width=4, activation="silu", has_bias=True) -> Op:
    return Op(
        "causal_conv1d",
        {"x_TI": torch.randn(num_tokens, channels).to(dtype)},
        {
            "weight_IW": torch.randn(channels, width),
            "bias_I": torch.randn(channels) if has_bias else None,
            "activation": activation,
        },
        "conv_SIW",
        (channels, width - 1),
        dtype,
    )


def make_mamba1(num_tokens, dtype=torch.float32, *, channels=37, num_states=16, is_gated=True) -> Op:
    tokens = {"x_TI": channels, "dt_TI": channels, "B_TN": num_states, "C_TN": num_states}
    if is_gated:
        tokens["z_TI"] = channels
    optional = {} if is_gated else {"z_TI": None, "dt_bias_I": None}
    weights = {"A_IN": -4 * torch.rand(channels, num_states), "D_I": torch.randn(channels)}
    return Op(
        "mamba1_scan",
        {name: torch.randn(num_tokens, size).to(dtype) for name, size in tokens.items()},
        weights | ({"dt_bias_I": torch.randn(channels) - 1} if is_gated else {}),
        "state_SIN",
        (channels, num_states),
        options=optional,
    )


def make_mamba2(
    num_tokens, dtype=torch.float32, *, heads=6, groups=2, size=20, num_states=40, chunk=8, dt_limit=(0.01, 4.0)
) -> Op:
    tokens = {"x_THD": (heads, size), "dt_TH": (heads,), "B_TGN": (groups, num_states), "C_TGN": (groups, num_states)}
    weights = {"A_H": -2 * torch.rand(heads), "D_H": torch.randn(heads), "dt_bias_H": torch.randn(heads) - 1}
    return Op(
        "mamba2_scan",
        {name: torch.randn(num_tokens, *shape).to(dtype) for name, shape in tokens.items()},
        weights | {"dt_limit": dt_limit, "chunk": chunk},
        "state_SHDN",
        (heads, size, num_states),
    )


def make_delta(
    num_tokens,
    dtype=torch.float32,
    *,
    heads=6,
    groups=2,
    key_size=20,
    size=40,
    is_by_row=False,
    beta_scale=1.0,
    has_bias=True,
    chunk=8,
) -> Op:
    """Keys of neighbours are alike, as in a text that repeats itself: what is written is mostly there already."""
    decays = key_size if is_by_row else 1
    keys = {"q_TGN": (groups, key_size), "k_TGN": (groups, key_size)}
    tokens = keys | {"v_THD": (heads, size), "dt_THN": (heads, decays), "b_TH": (heads,)}
    inputs = {name: torch.randn(num_tokens, *shape) for name, shape in tokens.items()}
    inputs["k_TGN"] += torch.randn(groups, key_size)
    return Op(
        "gated_delta_rule",
        {name: tensor.to(dtype) for name, tensor in inputs.items()},
        {
            "A_H": -2 * torch.rand(heads),
            "dt_bias_HN": torch.randn(heads, decays) - 2 if has_bias else None,
            "beta_scale": beta_scale,
            "chunk": chunk,
        },
        "state_SHND",
        (heads, key_size, size),
    )


MAKERS: dict[str, Callable[..., Op]] = {
    "conv": make_conv,
    "conv_of_3_plain": partial(make_conv, width=3, activation=None, has_bias=False),
    "mamba1": make_mamba1,
    "mamba1_plain": partial(make_mamba1, channels=16, num_states=5, is_gated=False),
    "mamba2": make_mamba2,
    "delta": make_delta,
    "delta_by_row": partial(make_delta, groups=6, key_size=36, size=20, is_by_row=True, beta_scale=2.0),
    "delta_plain": partial(make_delta, heads=2, groups=1, key_size=5, size=32, has_bias=False),
}


@pytest.fixture(params=MAKERS)
def make_op(request):
    """A maker of each op, called with a number of tokens and a dtype."""
    return MAKERS[request.param]


@pytest.fixture
def make_any_conv():
    return make_conv


@pytest.fixture
def make_any_mamba1():
    return make_mamba1


@pytest.fixture
def make_any_delta():
    return make_delta


@pytest.fixture
def make_any_mamba2():
    return make_mamba2
