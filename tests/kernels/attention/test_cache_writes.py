"""What is stored into the blocks, and that nothing else changes."""

import pytest
import torch
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.attention import copy_blocks, qkv_norm_rope_write, reference, write_kv

pytestmark = pytest.mark.usefixtures("path")

SLOTS = [35, 7, 0, 16, 79]
# Rotations and norms in float32, rounded once to bfloat16: half a unit in the last of 8 bits each.
TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 1e-6}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-3}}


def make_caches(dtype, kv_heads=2, size=32):
    return torch.randn(5, kv_heads, 16, size).to(dtype), torch.randn(5, kv_heads, 16, size).to(dtype)


def test_keys_and_values_land_in_their_slots_and_nowhere_else(dtype):
    k_cache, v_cache = make_caches(dtype)
    k_TKD, v_TKD = torch.randn(5, 2, 32).to(dtype), torch.randn(5, 2, 32).to(dtype)
    expected = [k_cache.clone(), v_cache.clone()]
    for token, slot in enumerate(SLOTS):
        expected[0][slot // 16, :, slot % 16] = k_TKD[token]
        expected[1][slot // 16, :, slot % 16] = v_TKD[token]
    write_kv(k_TKD, v_TKD, k_cache_BKPD=k_cache, v_cache_BKPD=v_cache, slots_T=torch.tensor(SLOTS))
    assert torch.equal(k_cache, expected[0])
    assert torch.equal(v_cache, expected[1])


def test_strided_keys_go_into_strided_caches(dtype):
    pages = torch.zeros(5, 2, 3, 16, 32).to(dtype)
    k_THD = torch.randn(5, 32, 9).to(dtype).transpose(1, 2)
    write_kv(
        k_THD[:, 1:7:2],
        k_THD[:, 2:8:2],
        k_cache_BKPD=pages[:, 0],
        v_cache_BKPD=pages[:, 1],
        slots_T=torch.tensor(SLOTS),
    )
    assert torch.equal(pages[2, 0, :, 3], k_THD[0, 1:7:2])
    assert torch.equal(pages[4, 1, :, 15], k_THD[4, 2:8:2])


def test_values_of_another_size_land_in_their_slots_and_are_copied(dtype):
    k_cache, v_cache = make_caches(dtype)[0], torch.randn(5, 2, 16, 24).to(dtype)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    qkv_TC = torch.randn(5, 4 * 32 + 2 * 32 + 2 * 24).to(dtype)
    none_TD = torch.zeros(5, 0)
    q_THD = qkv_norm_rope_write(
        qkv_TC,
        k_cache_BKPD=k_cache,
        v_cache_BKPD=v_cache,
        slots_T=torch.tensor(SLOTS),
        cos_TD=none_TD,
        sin_TD=none_TD,
    )
    assert torch.equal(q_THD, qkv_TC[:, :128].view(5, 4, 32))
    write_kv(
        qkv_TC[:, 128:192].view(5, 2, 32),
        qkv_TC[:, 192:].view(5, 2, 24),
        k_cache_BKPD=k_before,
        v_cache_BKPD=v_before,
        slots_T=torch.tensor(SLOTS),
    )
    assert torch.equal(k_cache, k_before)
    assert torch.equal(v_cache, v_before)
    copy_blocks(k_cache, v_cache, copies=[(2, 1, 5)])
    assert torch.equal(v_cache[1, :, :5], v_before[2, :, :5])


@pytest.mark.parametrize("slot", [-1, 80])
@on_cpu_paths
def test_a_slot_outside_the_cache_is_an_error_and_nothing_is_written(slot):
    k_cache, v_cache = make_caches(torch.float32)
    before = k_cache.clone()
    k_TKD, slots_T = torch.randn(2, 2, 32), torch.tensor([3, slot])
    with pytest.raises(IndexError, match="slots_T holds"):
        write_kv(k_TKD, k_TKD, k_cache_BKPD=k_cache, v_cache_BKPD=v_cache, slots_T=slots_T)
    assert torch.equal(k_cache, before)


@on_cpu_paths
def test_other_dtypes_than_the_caches_are_refused():
    k_cache, v_cache = make_caches(torch.bfloat16)
    k_TKD = torch.randn(5, 2, 32)
    with pytest.raises(ShapeError, match="k_TKD is"):
        write_kv(k_TKD, k_TKD, k_cache_BKPD=k_cache, v_cache_BKPD=v_cache, slots_T=torch.tensor(SLOTS))


def test_copies_move_the_first_slots_in_order(dtype):
    k_cache, v_cache = make_caches(dtype)
    k_before, v_before = k_cache.clone(), v_cache.clone()
    copy_blocks(k_cache, v_cache, copies=[(1, 3, 5), (3, 4, 16)])
    assert torch.equal(k_cache[3, :, :5], k_before[1, :, :5])
    assert torch.equal(k_cache[4, :, :5], k_before[1, :, :5])
    assert torch.equal(v_cache[4, :, 5:], v_before[3, :, 5:])
    assert torch.equal(v_cache[:3], v_before[:3])


@pytest.mark.parametrize("copy", [(5, 0, 1), (0, -1, 1), (0, 1, 17)])
@on_cpu_paths
def test_copies_that_leave_the_cache_are_refused(copy):
    with pytest.raises(ShapeError, match="must stay within 5 blocks of 16 slots"):
        copy_blocks(*make_caches(torch.float32), copies=[copy])


def run_fused(function, dtype, *, kv_heads, heads, size, rotary, norm_dtype, zero_centered):
    torch.manual_seed(1)
    k_cache, v_cache = make_caches(dtype, kv_heads, size)
    norms = {} if norm_dtype is None else {n: torch.randn(size).to(norm_dtype) for n in ("q_norm_D", "k_norm_D")}
    arguments = {"q_norm_D": None, "k_norm_D": None, "eps": 1e-6, "zero_centered": zero_centered, **norms}
    angles = torch.randn(5, rotary)
    q_THD = function(
        torch.randn(5, (heads + 2 * kv_heads) * size).to(dtype),
        k_cache_BKPD=k_cache,
        v_cache_BKPD=v_cache,
        slots_T=torch.tensor(SLOTS),
        cos_TD=angles.cos(),
        sin_TD=angles.sin(),
        **arguments,
    )
    return q_THD, k_cache, v_cache


@pytest.mark.parametrize(
    "case",
    [
        {"kv_heads": 1, "heads": 4, "size": 256, "rotary": 256, "norm_dtype": torch.bfloat16, "zero_centered": True},
        {"kv_heads": 2, "heads": 6, "size": 80, "rotary": 20, "norm_dtype": torch.float32, "zero_centered": False},
        {"kv_heads": 2, "heads": 2, "size": 32, "rotary": 32, "norm_dtype": None, "zero_centered": False},
        {"kv_heads": 1, "heads": 3, "size": 24, "rotary": 12, "norm_dtype": None, "zero_centered": False},
        {"kv_heads": 2, "heads": 4, "size": 128, "rotary": 128, "norm_dtype": torch.float32, "zero_centered": False},
        {"kv_heads": 1, "heads": 2, "size": 64, "rotary": 64, "norm_dtype": None, "zero_centered": False},
    ],
    ids=["gemma3", "partial_rotary", "no_norm", "odd_size", "whole_128", "whole_64"],
)
def test_the_fused_projection_is_its_parts_in_turn(dtype, case):
    fused = run_fused(qkv_norm_rope_write, dtype, **case)
    apart = run_fused(reference.qkv_norm_rope_write, dtype, **case)
    for got, expected in zip(fused, apart, strict=True):
        torch.testing.assert_close(got, expected, **TOLERANCE[dtype])


def test_the_fused_projection_accepts_a_strided_projection(dtype):
    k_cache, v_cache = make_caches(dtype)
    other_k, other_v = k_cache.clone(), v_cache.clone()
    wide = torch.randn(5, 400).to(dtype)
    angles = torch.randn(5, 64)[:, ::2]
    tables = {"slots_T": torch.tensor(SLOTS), "cos_TD": angles.cos(), "sin_TD": angles.sin()}
    got = qkv_norm_rope_write(wide[:, 100:356], k_cache_BKPD=k_cache, v_cache_BKPD=v_cache, **tables)
    expected = qkv_norm_rope_write(wide[:, 100:356].clone(), k_cache_BKPD=other_k, v_cache_BKPD=other_v, **tables)
    assert torch.equal(got, expected)
    assert torch.equal(k_cache, other_k)


@pytest.mark.parametrize(
    ("columns", "rotary", "message"),
    [(7 * 32 + 1, 32, "columns, must be"), (4 * 32, 32, "columns, must be"), (8 * 32, 34, "cos_TD has 34 columns")],
)
@on_cpu_paths
def test_projections_that_do_not_fit_are_refused(columns, rotary, message):
    k_cache, v_cache = make_caches(torch.float32)
    table = torch.zeros(5, rotary)
    with pytest.raises(ShapeError, match=message):
        qkv_norm_rope_write(
            torch.zeros(5, columns),
            k_cache_BKPD=k_cache,
            v_cache_BKPD=v_cache,
            slots_T=torch.tensor(SLOTS),
            cos_TD=table,
            sin_TD=table,
        )
