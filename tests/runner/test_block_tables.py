from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.groups.spec import FullAttentionSpec, Group
from hybrid_engine.runner.block_tables import BlockTables, Row
from hybrid_engine.step_plan import BlockMove

GROUP = Group(0, FullAttentionSpec(1, 8, 4, block_size=1), (0,))


def moved(table: list[int], moves: list[tuple[int, int]]) -> list[int]:
    tables = BlockTables(GROUP, 1000)
    tables.start(Row(3), table)
    tables.move([BlockMove(0, source, target) for source, target in moves])
    return tables.gather([3], tables._lengths[3:4])[0].tolist()


def test_blocks_that_were_moved_lie_where_they_were_moved_to_last():
    assert moved([5, 6, 7], [(5, 9), (7, 5), (9, 12)]) == [12, 6, 5]


def test_a_new_block_that_came_where_another_had_lain_is_not_taken_for_it():
    # The second move is of a block that was given out after the first, in the same step.
    assert moved([5, 6], [(5, 9), (5, 13)]) == [9, 6]


@given(
    places=st.lists(st.integers(1, 6), min_size=1, max_size=3, unique=True),
    wishes=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6), st.booleans()), max_size=40),
)
def test_any_moves_do_what_they_would_do_one_by_one(places, wishes):
    where, new, moves = dict(zip(range(len(places)), places, strict=True)), set(), []
    for source, target, is_new in wishes:
        taken = set(where.values()) | new
        if is_new and source not in taken:
            new.add(source)
            taken.add(source)
        if source in taken and target not in taken:
            moves.append((source, target))
            if source in new:
                new = new - {source} | {target}
            else:
                where = {block: target if place == source else place for block, place in where.items()}
    if moves:
        assert moved(places, moves) == list(where.values())
