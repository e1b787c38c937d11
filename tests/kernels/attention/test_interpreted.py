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


@pytest.mark.parametrize("sizes", [(32, 16), (20, 40), (528, 512)], ids=str)
def test_values_of_another_size_than_keys(problem, dtype, sizes, without_torch):
    problem(**MIXED, dtype=dtype, size=sizes[0], v_size=sizes[1], window=20).check()


@pytest.mark.parametrize("sizes", [(48, 40), (576, 512)], ids=str)
def test_values_that_are_parts_of_keys(problem, sizes, without_torch):
    case = problem(**MIXED, dtype=torch.bfloat16, size=sizes[0], heads=70, kv_heads=1)
    case.v_cache_BKPD = case.k_cache_BKPD[..., : sizes[1]]
    case.check()


def test_sinks_take_their_share_in_both(problem):
    problem(num_queries=[1, 1, 7], num_keys=[1, 300, 40], sinks_H=torch.randn(4)).check()


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 0.5}], ids=str)
def test_exact_queries_have_the_same_bits_in_any_chunk(problem, dtype, options):
    problem(num_queries=[23], num_keys=[70], dtype=dtype, **options).check_exact(6, 7)


def test_members_read_the_keys_that_they_share_from_the_table_of_one(shared_problem):
    prefixes = [[("all", 96)], [("all", 96)], [("other", 2)]]
    case = shared_problem(
        prefixes=prefixes, own_keys=[3, 270, 9], dtype=torch.bfloat16, heads=3, kv_heads=1, window=1802
    )
    case.check()
    expected = case.run()
    # Its first split is not inside the second one's window, and so its own to read.
    case.meta.block_tables_RB[1, 16:96] = 0
    assert torch.equal(case.run(), expected)
    case.meta.block_tables_RB[1, 15] = 0
    assert case.run()[1].isnan().all()
