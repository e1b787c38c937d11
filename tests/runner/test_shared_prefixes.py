"""Which requests of a step share keys: found in the tables, and looked for anew only when something changed."""

import numpy as np
import pytest

from hybrid_engine.groups.spec import ChunkedLocalSpec, FullAttentionSpec, Group, SlidingWindowSpec
from hybrid_engine.runner import shared_prefixes
from hybrid_engine.runner.block_tables import BlockTables
from hybrid_engine.runner.shared_prefixes import SharedPrefixes
from hybrid_engine.step_plan import BlockMove

P = 16
SIZE = (1, 16, 4, P)
PREFIX = range(1, 129)  # 2,048 keys
ROWS = np.array([4, 1, 6])


@pytest.fixture
def looked(monkeypatch) -> list:
    """One entry for each time that tables were compared."""
    calls: list = []
    find = shared_prefixes.find_shared
    monkeypatch.setattr(shared_prefixes, "find_shared", lambda *args, **rest: calls.append(0) or find(*args, **rest))
    return calls


def make_tables(spec=None) -> BlockTables:
    """Three requests of 2,048 keys in common and 320 of their own."""
    tables = BlockTables(Group(0, spec or FullAttentionSpec(*SIZE), (0,)), 1000)
    for index, row in enumerate(ROWS.tolist()):
        tables.start(row, [*PREFIX, *range(200 + 20 * index, 220 + 20 * index)])
    return tables


def find(sharing: SharedPrefixes, *, num_keys=(2060, 2049, 2368), num_queries=(1, 1, 1), rows=ROWS):
    found = sharing.find(rows, np.array(num_queries[: len(rows)]), np.array(num_keys[: len(rows)]))
    return [(shared.first_key, shared.end_key, shared.members.tolist()) for shared in found]


def test_requests_that_begin_with_the_same_blocks_share_them():
    assert find(SharedPrefixes(make_tables(), 1)) == [(0, 2048, [0, 1, 2])]


def test_a_request_with_many_queries_does_not():
    assert find(SharedPrefixes(make_tables(), 4), num_queries=(1, 5, 4)) == [(0, 2048, [0, 2])]
    assert find(SharedPrefixes(make_tables(), 0)) == []


def test_a_block_that_a_request_still_writes_is_not_shared():
    # The first one's query writes key 2,047. What the two others share beyond would spare too little.
    assert find(SharedPrefixes(make_tables(), 1), num_keys=(2048, 2049, 2049)) == [(0, 1536, [0, 1, 2])]


def test_while_the_same_requests_go_on_tables_are_not_looked_at_again(looked):
    sharing = SharedPrefixes(make_tables(), 1)
    answers = [find(sharing, num_keys=(2060 + step, 2049 + step, 2100 + step)) for step in range(5)]
    assert answers == [[(0, 2048, [0, 1, 2])]] * 5
    assert len(looked) == 1


def test_one_that_leaves_or_joins_changes_what_is_shared():
    sharing = SharedPrefixes(make_tables(), 1)
    assert find(sharing, rows=ROWS[:2]) == [(0, 2048, [0, 1])]
    assert find(sharing) == [(0, 2048, [0, 1, 2])]
    assert find(sharing, rows=ROWS[::-1][:2]) == [(0, 2048, [0, 1])]
    assert find(sharing, rows=ROWS[:1]) == []


def test_another_request_in_the_same_row_is_noticed():
    tables = make_tables()
    sharing = SharedPrefixes(tables, 1)
    assert find(sharing) == [(0, 2048, [0, 1, 2])]
    tables.start(1, range(500, 650))
    assert find(sharing) == [(0, 2048, [0, 2])]


def test_blocks_that_were_moved_are_shared_where_they_are(looked):
    tables = make_tables()
    sharing = SharedPrefixes(tables, 1)
    find(sharing)
    tables.move([BlockMove(0, 5, 900)])
    assert find(sharing) == [(0, 2048, [0, 1, 2])]
    assert len(looked) == 2


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (SlidingWindowSpec(*SIZE, window=4096), [(0, 2048, [0, 1, 2])]),
        (SlidingWindowSpec(*SIZE, window=2368), [(0, 2048, [0, 1, 2])]),
        (SlidingWindowSpec(*SIZE, window=2367), [(512, 2048, [0, 1, 2])]),
        (SlidingWindowSpec(*SIZE, window=600), []),
        (ChunkedLocalSpec(*SIZE, chunk=1024), []),
        (ChunkedLocalSpec(*SIZE, chunk=8192), [(0, 2048, [0, 1, 2])]),
    ],
    ids=str,
)
def test_only_what_is_in_everybodys_window_is_shared(spec, expected):
    # The last query, at position 2,367, sees keys from 2,368 - window on.
    assert find(SharedPrefixes(make_tables(spec), 1)) == expected
