"""Keys that several requests share: which are found, and that reading them once changes nothing."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from hybrid_engine.kernels.attention import AttentionMeta, cpu, shared
from hybrid_engine.kernels.attention.shared import TILE_MEMBERS, count_tiles, find_shared, make_tables

P = 16
ALL = [("system", 64)]
"""1,024 keys that everybody shares."""


def found(prefixes, *, num_keys=None, **options) -> list[tuple[int, int, list[int]]]:
    """Ranges of tables that begin with runs of blocks named by numbers."""
    tables = [[1000 * name + i for name, n in parts for i in range(n)] for parts in prefixes]
    tables_RB = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, table in zip(tables_RB, tables, strict=True):
        row[: len(table)] = table
    num_keys_R = np.array(num_keys or [len(table) * P for table in tables])
    ranges = find_shared(tables_RB, num_keys_R, block_size=P, **options)
    return [(each.first_key, each.end_key, each.members.tolist()) for each in ranges]


def test_what_all_begin_with_is_shared_in_whole_units():
    assert found([[(1, 100), (2, 9)], [(1, 100), (3, 50)], [(1, 100)]]) == [(0, 1536, [0, 1, 2])]


def test_behind_what_all_share_some_share_more():
    prefixes = [[(1, 64), (2, 128)], [(1, 64), (3, 128)], [(1, 64), (2, 128)], [(1, 64), (3, 128)]]
    assert found(prefixes) == [(0, 1024, [0, 1, 2, 3]), (1024, 3072, [0, 2]), (1024, 3072, [1, 3])]


def test_what_few_share_goes_on_where_the_range_of_all_ends():
    # 40 blocks of all are 512 keys and a rest, which belongs to the second range of the two.
    prefixes = [[(1, 40), (2, 100)], [(1, 40), (2, 90)], [(1, 40)], [(1, 40)]]
    assert found(prefixes) == [(0, 512, [0, 1, 2, 3]), (512, 2048, [0, 1])]


@pytest.mark.parametrize(
    ("prefixes", "num_keys"),
    [
        ([[(1, 100)]], None),
        ([[(1, 100)], [(2, 100)]], None),
        ([[(1, 31)]] * 40, None),
        ([[(1, 70)]] * 2, None),
        ([[(1, 40)]] * 3, None),
        ([[(1, 100)]] * 2, [1600, 0]),
        ([[(1, 1), (2, 100)], [(3, 1), (2, 100)]], None),
    ],
    ids=[
        "one request",
        "other blocks",
        "less than a unit",
        "too few",
        "too little",
        "takes no part",
        "another first block",
    ],
)
def test_nothing_is_shared_that_does_not_pay(prefixes, num_keys):
    assert found(prefixes, num_keys=num_keys) == []


def test_keys_that_not_all_may_share_end_a_range():
    assert found([[(1, 100)]] * 3, num_keys=[1600, 1100, 1599]) == [(0, 1024, [0, 1, 2])]
    assert found([[(1, 200)]] * 3, num_keys=[3200, 1100, 3199]) == [(0, 1024, [0, 1, 2]), (1024, 3072, [0, 2])]


def test_before_the_first_key_blocks_may_differ():
    assert found([[(1, 32), (2, 100)], [(3, 32), (2, 100)]], first_key=512) == [(512, 2048, [0, 1])]


def test_more_members_than_a_tile_has_take_two():
    tables_RB = np.tile(np.arange(64, dtype=np.int32), (TILE_MEMBERS + 1, 1))
    ranges = find_shared(tables_RB, np.full(TILE_MEMBERS + 1, 1024), block_size=P)
    tiles_XC, spans_R2 = make_tables(ranges, TILE_MEMBERS + 2, num_tiles=4)
    assert count_tiles(ranges) == 2
    members = tiles_XC[:, 2:]
    assert sorted(members[members >= 0]) == list(range(TILE_MEMBERS + 1))
    assert (tiles_XC[2:, 2:] == -1).all()
    assert spans_R2.tolist() == [[0, 1024]] * (TILE_MEMBERS + 1) + [[0, 0]]


TREE = {
    "prefixes": [ALL, [*ALL, ("a", 96)], [*ALL, ("a", 96)], [*ALL, ("b", 9)], [("other", 3)]],
    "own_keys": [1, 700, 33, 513, 5],
}


@pytest.mark.usefixtures("path")
class TestOnEveryPath:
    """Against the reference, and against the same without sharing."""

    def test_sharers_and_others_in_one_call(self, shared_problem, dtype):
        case = shared_problem(**TREE, dtype=dtype)
        assert case.meta.shared is not None
        case.check()

    @pytest.mark.parametrize(
        "options",
        [
            {"heads": 2},
            {"heads": 6, "kv_heads": 1, "size": 80},
            {"heads": 12, "kv_heads": 1},
            {"heads": 40, "kv_heads": 1},
            {"block_size": 8},
            {"softcap": 0.5},
            {"sinks_H": torch.linspace(-2, 2, 4)},
        ],
        ids=str,
    )
    def test_heads_blocks_caps_and_sinks(self, shared_problem, options):
        blocks = 1024 // options.get("block_size", P)
        prefixes = [[("system", blocks)], [("system", blocks)], [("system", blocks), ("more", 3)]]
        shared_problem(prefixes=prefixes, own_keys=[7, 530, 1], dtype=torch.bfloat16, **options).check()

    @pytest.mark.parametrize("options", [{"window": 1500}, {"window": 700}, {"chunk": 600}, {"chunk": 4096}], ids=str)
    def test_what_a_window_hides_stays_hidden(self, shared_problem, options):
        shared_problem(**TREE, dtype=torch.bfloat16, **options).check()

    def test_requests_with_several_queries_share_nothing_by_mistake(self, shared_problem):
        case = shared_problem(**TREE, dtype=torch.bfloat16, num_queries=[1, 20, 1, 1, 3])
        assert case.meta.shared is not None
        case.check()

    def test_a_table_of_nobody_changes_nothing(self, shared_problem):
        case = shared_problem(**TREE, dtype=torch.bfloat16)
        keys = case.meta.shared
        filler = torch.full((3, keys.tiles_XC.shape[1]), -1, dtype=torch.int32)
        filler[:, :2] = 0
        tiles_XC = torch.cat([keys.tiles_XC, filler.to(keys.tiles_XC.device)])
        case.meta = replace(case.meta, shared=replace(keys, tiles_XC=tiles_XC))
        case.check()


@pytest.mark.parametrize("path", ["native"], indirect=True)
@pytest.mark.usefixtures("path")
class TestBits:
    """On a CPU sharing changes not a bit, and so it may be chosen freely."""

    @pytest.mark.parametrize("heads", [2, 6, 8, 24], ids=lambda heads: f"{heads // 2} rows a request")
    def test_sharing_changes_no_bit(self, shared_problem, dtype, heads):
        case = shared_problem(**TREE, dtype=dtype, heads=heads)
        together = case.run()
        case.meta = replace(case.meta, shared=None)
        assert torch.equal(case.run(), together)

    def test_drafts_are_shared_too_and_change_no_bit(self, shared_problem, dtype, monkeypatch):
        monkeypatch.setattr(cpu, "num_threads", lambda: 1)  # more would share the work, not the keys
        case = shared_problem(prefixes=[ALL] * 3, own_keys=[9, 5, 20], num_queries=[5, 1, 17], dtype=dtype)
        alone = case.run()
        tables_RB = case.meta.block_tables_RB.numpy()
        ranges = find_shared(tables_RB, np.array([1024, 1024, 1024]), block_size=P)
        tables = make_tables(ranges, 3, num_tiles=1)
        case.meta = replace(case.meta, shared=shared.SharedKeys(*map(torch.from_numpy, tables)))
        assert torch.equal(case.run(), alone)
        # That it was used shows where a member's table isn't read.
        case.meta.block_tables_RB[1, :64] = case.meta.block_tables_RB[1, 64]
        assert torch.equal(case.run(), alone)

    def test_the_members_read_the_table_of_one(self, shared_problem):
        case = shared_problem(**TREE)
        expected = case.run()
        case.meta.block_tables_RB[1:4, :64] = case.meta.block_tables_RB[1:4, 64:65]
        assert torch.equal(case.run(), expected)


def test_a_member_that_does_not_exist_is_an_error(shared_problem):
    case = shared_problem(prefixes=[ALL] * 3, own_keys=[3, 4, 5])
    case.meta.shared.tiles_XC[0, 2] = 3
    with pytest.raises(IndexError):
        case.run()


def test_meta_built_without_sharers_has_no_table():
    meta = AttentionMeta.build(
        num_queries=[1, 1], num_keys=[9, 9], block_tables=[[1], [2]], block_size=P, is_shared=True
    )
    assert meta.shared is None
