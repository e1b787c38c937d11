"""Rotary embedding against plain torch and against its definition."""

import math

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.rope import apply_rope, reference, rope_table

pytestmark = pytest.mark.usefixtures("path")

# One rounding of the result.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


@pytest.mark.parametrize(("size", "rotary"), [(256, 256), (80, 20), (32, 32), (6, 6), (40, 2)])
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_heads_turn_as_in_the_reference(dtype, size, rotary, num_tokens):
    q_THD, k_TKD = torch.randn(num_tokens, 4, size).to(dtype), torch.randn(num_tokens, 1, size).to(dtype)
    tables = {"cos_TD": torch.randn(num_tokens, rotary), "sin_TD": torch.randn(num_tokens, rotary)}
    got, expected = apply_rope(q_THD, k_TKD, **tables), reference.apply_rope(q_THD, k_TKD, **tables)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, **TOLERANCE[dtype])


@pytest.mark.parametrize("magnitude", [1.0, 1.3])
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_a_table_is_that_of_the_reference(num_tokens, magnitude):
    positions_T = torch.arange(num_tokens) * 1999  # far ones too: their angles have many turns
    frequencies_F = 1e4 ** -torch.linspace(0, 1, 24)
    got, expected = (op(positions_T, frequencies_F, magnitude=magnitude) for op in (rope_table, reference.rope_table))
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_a_table_wants_whole_positions():
    with pytest.raises(ShapeError, match="positions_T is float32"):
        rope_table(torch.zeros(2), torch.ones(3))


def test_element_i_turns_with_element_i_plus_half():
    angle = math.pi / 6
    table = torch.tensor([[angle, 0.0, angle, 0.0]])
    turned, _ = apply_rope(
        torch.tensor([[[1.0, 5.0, 0.0, 7.0]]]), torch.zeros(1, 1, 4), cos_TD=table.cos(), sin_TD=table.sin()
    )
    torch.testing.assert_close(turned, torch.tensor([[[math.cos(angle), 5.0, math.sin(angle), 7.0]]]))


def test_heads_may_be_slices_of_a_projection(dtype):
    heads = torch.randn(5, 7, 64).to(dtype)
    tables = {"cos_TD": torch.randn(5, 64), "sin_TD": torch.randn(5, 64)}
    got = apply_rope(heads[:, :4], heads[:, 4:6], **tables)
    expected = apply_rope(heads[:, :4].clone(), heads[:, 4:6].clone(), **tables)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 4, 8), (2, 1, 6), (2, 8)), "k_TKD has shape"),
        (((2, 4, 8), (2, 1, 8), (3, 8)), "cos_TD has shape"),
        (((2, 4, 8), (2, 1, 8), (2, 10)), "cos_TD has 10 columns"),
        (((2, 4, 8), (2, 1, 8), (2, 5)), "cos_TD has 5 columns"),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(shapes, message):
    q_THD, k_TKD, table = map(torch.zeros, shapes)
    with pytest.raises(ShapeError, match=message):
        apply_rope(q_THD, k_TKD, cos_TD=table, sin_TD=table)
