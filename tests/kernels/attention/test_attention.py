"""Attention against its reference: who sees what, in every kind of batch."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.attention import AttentionMeta, attention, reference

P = 16
MIXED = {"num_queries": [1, 37, 1, 5, 16], "num_keys": [1, 37, 70, 69, 130]}

pytestmark = pytest.mark.usefixtures("path")


@pytest.mark.parametrize("num_keys", [1, P - 1, P, P + 1, 3 * P + 5, 700])
def test_one_query_sees_all_its_keys(problem, dtype, num_keys):
    problem(num_queries=[1], num_keys=[num_keys], dtype=dtype).check()


@pytest.mark.parametrize("num_queries", [1, 2, 5, P, P + 1, 63, 131])
def test_a_prompt_is_causal(problem, dtype, num_queries):
    problem(num_queries=[num_queries], num_keys=[num_queries], dtype=dtype).check()


@pytest.mark.parametrize("num_queries", [2, 7, 33])
def test_a_suffix_sees_the_prefix_before_it(problem, dtype, num_queries):
    problem(num_queries=[num_queries], num_keys=[num_queries + 75], dtype=dtype).check()


def test_prefill_and_decode_mix_in_one_call(problem, dtype):
    problem(**MIXED, dtype=dtype).check()


@pytest.mark.parametrize("window", [1, P - 1, P, P + 1, 50])
def test_a_window_hides_older_keys(problem, dtype, window):
    problem(**MIXED, dtype=dtype, window=window).check()


@pytest.mark.parametrize("chunk", [1, P, 24, 100])
def test_a_chunk_hides_keys_before_it(problem, dtype, chunk):
    problem(**MIXED, dtype=dtype, chunk=chunk).check()


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (3, 1), (8, 2), (8, 1), (9, 1), (24, 2)])
def test_query_heads_share_kv_heads(problem, dtype, heads, kv_heads):
    problem(**MIXED, dtype=dtype, heads=heads, kv_heads=kv_heads, window=40).check()


@pytest.mark.parametrize("size", [16, 64, 80, 128, 256, 20])
def test_head_sizes(problem, dtype, size):
    problem(**MIXED, dtype=dtype, size=size).check()


@pytest.mark.parametrize("block_size", [1, 5, 8, 64, 256])
def test_block_sizes(problem, dtype, block_size):
    problem(**MIXED, dtype=dtype, block_size=block_size, window=33).check()


def test_scores_are_soft_capped(problem, dtype):
    problem(**MIXED, dtype=dtype, softcap=0.5).check()


def test_sinks_take_their_share(problem, dtype):
    problem(**MIXED, dtype=dtype, sinks_H=torch.randn(4), window=20).check()


@pytest.mark.parametrize("v_size", [16, 48])
@pytest.mark.parametrize("options", [{}, {"window": 20}, {"chunk": 24, "softcap": 0.5}, {"sinks": True}], ids=str)
def test_values_may_have_another_size_than_keys(problem, dtype, v_size, options, path, request):
    options = dict(options)
    sinks_H = torch.randn(4) if options.pop("sinks", False) else None
    if path != "torch":
        request.getfixturevalue("without_torch")
    case = problem(**MIXED, dtype=dtype, v_size=v_size, sinks_H=sinks_H, **options)
    assert case.run().shape == (*case.q_THD.shape[:2], v_size)
    case.check()


@pytest.mark.parametrize("sizes", [(48, 32), (576, 512)], ids=str)
def test_values_may_be_parts_of_keys(problem, dtype, sizes, path, request):
    if path != "torch":
        request.getfixturevalue("without_torch")
    case = problem(num_queries=[1, 5, 1], num_keys=[600, 5, 3], dtype=dtype, size=sizes[0], heads=34, kv_heads=1)
    case.v_cache_BKPD = case.k_cache_BKPD[..., : sizes[1]]
    case.check()


@pytest.mark.parametrize("num_keys", [511, 512, 513, 1600])
def test_keys_split_among_threads_are_merged(problem, dtype, num_keys):
    problem(num_queries=[1, 2], num_keys=[num_keys, 1100], dtype=dtype, sinks_H=torch.randn(4)).check()


def test_several_queries_across_a_split_see_their_own_window(problem, dtype):
    problem(num_queries=[3], num_keys=[514], dtype=dtype, window=2).check()


def test_low_scores_keep_their_proportions(problem):
    case = problem(num_queries=[2, 40], num_keys=[600, 40])
    case.k_cache_BKPD[..., 0] = -400.0
    case.q_THD[..., 0] = 5.0
    # Scores near -354 carry an error of 3e-5 each.
    torch.testing.assert_close(case.run(), case.run(reference.attention), rtol=1e-3, atol=5e-4)


def test_a_request_without_queries_is_passed_over(problem):
    problem(num_queries=[3, 0, 2], num_keys=[20, 9, 2]).check()


def test_an_empty_batch_gives_an_empty_result(problem):
    assert problem(num_queries=[], num_keys=[]).run().shape == (0, 4, 32)


def test_queries_may_be_a_slice_of_a_projection(problem, dtype):
    case = problem(**MIXED, dtype=dtype)
    packed = torch.randn(60, 8 * 32).to(dtype)
    case.q_THD = packed[:, : 4 * 32].unflatten(1, (4, 32))
    case.check()


def test_caches_may_be_views_of_wider_blocks(problem, dtype):
    case = problem(**MIXED, dtype=dtype)
    pages = torch.stack([case.k_cache_BKPD, case.v_cache_BKPD], 1)
    expected = case.run(reference.attention)
    case.k_cache_BKPD, case.v_cache_BKPD = pages[:, 0], pages[:, 1]
    torch.testing.assert_close(case.run(), expected, rtol=2e-2, atol=1.5e-2)


def test_a_nan_key_that_is_seen_shows(problem):
    case = problem(num_queries=[1, 20], num_keys=[40, 20])
    case.k_cache_BKPD[case.meta.block_tables_RB[0, 1]] = torch.nan
    case.k_cache_BKPD[case.meta.block_tables_RB[1, 0]] = torch.nan
    assert case.run().isnan().all()


def test_neighbours_do_not_change_a_request(problem, dtype, path):
    if path in ("torch", "cuda"):
        pytest.skip("torch's products may depend on the batch")
    case = problem(**MIXED, dtype=dtype, window=40)
    together = case.run()
    for request, (start, stop) in enumerate([(0, 1), (1, 38), (38, 39), (39, 44), (44, 60)]):
        meta = case.meta
        case.meta = AttentionMeta(
            query_starts=torch.tensor([0, stop - start], dtype=torch.int32),
            num_keys=meta.num_keys[request : request + 1],
            block_tables_RB=meta.block_tables_RB[request : request + 1],
            slots_T=meta.slots_T[start:stop],
        )
        q_THD, case.q_THD = case.q_THD, case.q_THD[start:stop]
        assert torch.equal(case.run(), together[start:stop])
        case.meta, case.q_THD = meta, q_THD


@pytest.mark.parametrize("options", [{}, {"window": 40}, {"chunk": 500}], ids=["full", "window", "chunk"])
@pytest.mark.parametrize("heads", [2, 6, 10, 18, 40], ids=lambda heads: f"{heads // 2} rows a token")
@pytest.mark.parametrize("path", ["native"], indirect=True)  # elsewhere products may depend on the batch
def test_a_token_and_its_drafts_come_out_as_each_alone(problem, dtype, heads, options):
    num_queries, num_keys = 17, 1031  # across a split of the keys, and the edge of a chunk
    case = problem(num_queries=[num_queries], num_keys=[num_keys], dtype=dtype, heads=heads, **options)
    together, meta, q_THD = case.run(), case.meta, case.q_THD
    for token in range(num_queries):
        case.q_THD = q_THD[token : token + 1]
        case.meta = AttentionMeta(
            query_starts=torch.tensor([0, 1], dtype=torch.int32),
            num_keys=meta.num_keys - (num_queries - 1 - token),
            block_tables_RB=meta.block_tables_RB,
            slots_T=meta.slots_T[token : token + 1],
        )
        assert torch.equal(case.run(), together[token : token + 1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_THD": torch.zeros(60, 4, 16)}, "q_THD has shape"),
        ({"q_THD": torch.zeros(59, 4, 32)}, "q_THD has shape"),
        ({"q_THD": torch.zeros(60, 3, 32)}, "multiple of the 2 kv heads"),
        ({"q_THD": torch.zeros(60, 4, 32).bfloat16()}, "q_THD is torch.bfloat16"),
        ({"v_cache_BKPD": torch.zeros(5, 2, 16, 32)}, "v_cache_BKPD has shape"),
        ({"k_cache_BKPD": torch.zeros(5, 2, 16, 32).half()}, "must be float32 or bfloat16"),
        ({"options": {"window": 0}}, "window is 0"),
        ({"options": {"chunk": -1}}, "chunk is -1"),
        ({"options": {"sinks_H": torch.zeros(3)}}, "sinks_H has shape"),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(problem, change, message):
    case = problem(**MIXED)
    for name, value in change.items():
        setattr(case, name, value)
    with pytest.raises(ShapeError, match=message):
        case.run()


@pytest.mark.parametrize("entry", [-1, 10**6])
@on_cpu_paths
def test_a_visible_table_entry_outside_the_cache_is_an_error(problem, entry):
    case = problem(num_queries=[1], num_keys=[40])
    case.meta.block_tables_RB[0, 1] = entry
    with pytest.raises(IndexError):
        case.run()


@on_cpu_paths
def test_more_keys_than_the_table_holds_is_an_error(problem):
    case = problem(num_queries=[1], num_keys=[40])
    case.meta.num_keys[0] = 49
    with pytest.raises(IndexError):
        case.run()


def test_the_reference_is_sdpa_on_one_plain_prompt(problem):
    case = problem(num_queries=[48], num_keys=[48], kv_heads=4)
    k_HTD, v_HTD = (
        reference.gather(cache, case.meta.block_tables_RB[0], start=0, stop=48).transpose(0, 1)
        for cache in (case.k_cache_BKPD, case.v_cache_BKPD)
    )
    expected = torch.nn.functional.scaled_dot_product_attention(
        case.q_THD.transpose(0, 1), k_HTD, v_HTD, is_causal=True
    )
    torch.testing.assert_close(case.run(reference.attention).transpose(0, 1), expected)


@on_cpu_paths
def test_attention_is_keyword_only_past_the_queries(problem):
    case = problem(**MIXED)
    with pytest.raises(TypeError):
        attention(case.q_THD, case.k_cache_BKPD)  # type: ignore[misc, call-arg]


@pytest.mark.parametrize("options", [{}, {"window": 530}, {"chunk": 600, "softcap": 0.7}], ids=str)
@pytest.mark.parametrize("heads", [2, 12])
def test_exact_queries_have_the_same_bits_in_any_chunk(problem, dtype, heads, options):
    """The keys reach over three splits; chunks begin on both sides of their edges."""
    problem(num_queries=[150], num_keys=[1100], heads=heads, dtype=dtype, **options).check_exact(1, 3, 60, 75, 149)


@pytest.mark.parametrize("options", [{"window": 30}, {"size": 20}, {"v_size": 48}], ids=str)
def test_exact_queries_with_sinks_and_odd_heads_have_the_same_bits_in_any_chunk(problem, dtype, options):
    problem(num_queries=[40], num_keys=[90], dtype=dtype, sinks_H=torch.randn(4), **options).check_exact(7, 8)
