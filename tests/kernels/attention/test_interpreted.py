"""Triton's attention in its interpreter, quickly; the slow tests run all of the other files on it too."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreted")

MIXED = {"num_queries": [1, 11, 0, 1, 5], "num_keys": [1, 11, 9, 70, 69]}


@pytest.mark.parametrize(
    "options",
    [{"window": 20}, {"chunk": 24}, {"softcap": 0.5}, {"size": 20, "heads": 9, "kv_heads": 1}, {"block_size": 5}],
    ids=str,
)
def test_prefill_and_decode_mix_in_one_call(problem, dtype, options):
    problem(**MIXED, dtype=dtype, **options).check()


@pytest.mark.parametrize("window", [None, 257, 300])
def test_keys_in_several_splits_are_merged(problem, window):
    problem(num_queries=[1, 1], num_keys=[1, 600], window=window).check()


def test_values_of_another_size_go_through_torch(problem, dtype):
    problem(**MIXED, dtype=dtype, v_size=16, window=20).check()


def test_sinks_take_their_share_in_both(problem):
    problem(num_queries=[1, 1, 7], num_keys=[1, 300, 40], sinks_H=torch.randn(4)).check()


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.5}], ids=str)
def test_exact_queries_have_the_same_bits_in_any_chunk(problem, dtype, options):
    problem(num_queries=[23], num_keys=[70], dtype=dtype, **options).check_exact(6, 7)
