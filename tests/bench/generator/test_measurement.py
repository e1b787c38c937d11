"""What is measured of a workload, counted by hand."""

import random

import pytest

from hybrid_engine.bench.generator.measurement import Spread, _Ids, common_tokens, measure
from hybrid_engine.bench.workload import BlockPrompt, TokenPrompt, WorkItem


def tokens(session, *token_ids, answer=(), think_s=None):
    return WorkItem(session, TokenPrompt((token_ids,)), 1 + len(answer), answer, think_s=think_s)


def blocks(session, *runs, num_rest=0):
    num_tokens = 10 * sum(count for _, count in runs) + num_rest
    return WorkItem(session, BlockPrompt(num_tokens, runs, 10), 1)


def test_the_last_whole_block_does_not_make_a_prompt_diverge():
    assert measure([blocks("a", (0, 5)), blocks("a", (0, 4), (9, 4))]).diverged_share == 0


def test_reuse_counts_prefixes_of_prompts_and_answers():
    found = measure([tokens("a", 1, 2, 3, answer=(4, 5)), tokens("a", 1, 2, 3, 4, 6), tokens("b", 1, 2)])
    assert found.reuse == pytest.approx((4 + 2) / 10)
    assert found.reuse_within_sessions == pytest.approx(4 / 10)


def test_reuse_of_blocks_counts_whole_ones():
    found = measure([blocks("a", (0, 3), num_rest=4), blocks("a", (0, 3), (7, 2)), blocks("b", (0, 1), (7, 2))])
    assert found.reuse == pytest.approx((30 + 30) / (34 + 50 + 30))


def test_a_prompt_that_leaves_the_one_before_ahead_of_its_end_diverges():
    found = measure([blocks("a", (0, 5)), blocks("a", (0, 2), (9, 1)), blocks("a", (0, 2), (9, 4))])
    assert found.diverged_share == 0.5
    assert found.dropped_tokens == Spread(30, 30)
    assert found.new_tokens == Spread(20, pytest.approx(28))


@pytest.mark.parametrize("seed", range(3))
def test_known_blocks_are_those_that_a_set_would_know(seed):
    rng, ids, known = random.Random(seed), _Ids(), set()
    for _ in range(60):
        start = rng.randrange(100)
        wanted = set(range(start, start + rng.randrange(1, 15)))
        assert ids.add(start, start + len(wanted)) == len(wanted & known)
        known |= wanted


def test_think_times_are_those_between_calls():
    found = measure([tokens("a", 1, think_s=50), tokens("a", 1, 2, think_s=3)])
    assert found.think_s == Spread(3, 3)


def test_runs_may_be_cut_where_the_ids_go_on():
    one, other = BlockPrompt(60, ((0, 2), (2, 4)), 10), BlockPrompt(60, ((0, 5), (8, 1)), 10)
    assert common_tokens(one, other) == 50


def test_a_workload_without_calls_has_no_figures():
    assert measure([]).num_calls == 0
