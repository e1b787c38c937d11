"""Prompts in shared order: each shared prefix is counted once, and states are asked for where prompts part."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.evals.grouping import junctions, num_unique_tokens, shared_order

PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=8)


def common(one, other):
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(PROMPTS)
@settings(max_examples=200, deadline=None)
def test_unique_tokens_are_the_nodes_of_the_tree_of_prefixes(prompts):
    ordered = [prompts[i] for i in shared_order(prompts)]
    assert num_unique_tokens(ordered) == len({tuple(each[: n + 1]) for each in prompts for n in range(len(each))})


@given(PROMPTS)
@settings(max_examples=200, deadline=None)
def test_a_prompt_leaves_a_state_wherever_a_later_one_parts_from_it(prompts):
    ordered = [prompts[i] for i in shared_order(prompts)]
    found = junctions(ordered, [len(each) - 1 for each in ordered])
    for i, positions in enumerate(found):
        shared = ((common(ordered[i], other), len(other) - 1) for other in ordered[i + 1 :])
        assert positions == sorted({min(each) for each in shared if each[0]})


def test_order_keeps_questions_on_one_document_together():
    prompts = [[5, 1, 1], [7, 7, 7], [5, 1, 2], [7, 7, 8]]
    assert shared_order(prompts) == [0, 2, 1, 3]


def test_a_state_is_asked_for_no_later_than_it_can_be_used():
    assert junctions([[1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [3, 2]) == [[2], []]
