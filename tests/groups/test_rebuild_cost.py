"""How long it takes to compute tokens again: guessed from the groups, then learned from steps."""

import pytest
from bookkeeping import full, sliding

from hybrid_engine.groups.rebuild_cost import RebuildCost
from hybrid_engine.groups.spec import group_layers


def make_cost(*specs) -> RebuildCost:
    return RebuildCost(group_layers(dict(enumerate(specs))))


def test_late_tokens_of_a_long_prompt_cost_more_under_full_attention():
    cost = make_cost(full(), sliding(32))
    assert cost.seconds(10_000, 10_100) > 1.5 * cost.seconds(0, 100)


def test_under_windows_alone_all_tokens_cost_the_same():
    cost = make_cost(sliding(32))
    assert cost.seconds(10_000, 10_100) == pytest.approx(cost.seconds(0, 100))


def test_stretches_add_up():
    cost = make_cost(full())
    assert cost.seconds(0, 500) + cost.seconds(500, 900) == pytest.approx(cost.seconds(0, 900))


def test_it_learns_both_parts_from_steps():
    cost = make_cost(full())
    for start in (0, 4096, 65_536, 8192, 100_000):
        cost.note_step((start, 0), (512, 100), 1e-4 * 612 + 1e-9 * (512 * (start + 256) + 5000))
    assert cost.token_seconds == pytest.approx(1e-4)
    assert cost.pair_seconds == pytest.approx(1e-9)


def test_steps_that_are_all_alike_tell_the_tokens_share_alone():
    cost = make_cost(full())
    for _ in range(10):
        cost.note_step((0,), (512,), 0.512)
    assert cost.seconds(0, 1000) == pytest.approx(1.0)


def test_steps_of_a_few_tokens_teach_nothing():
    cost = make_cost(full())
    before = cost.seconds(0, 100)
    cost.note_step((100,), (1,), 5.0)
    assert cost.seconds(0, 100) == before
