import random

import numpy as np
import pytest

from hybrid_engine.bench.prefix_tree import PrefixTree


def array(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int64)


@pytest.fixture
def tree():
    tree = PrefixTree()
    tree.add(array(1, 2, 3, 4))
    tree.add(array(1, 2, 7))
    return tree


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [((), 0), ((9,), 0), ((1,), 1), ((1, 2), 2), ((1, 2, 3, 9), 3), ((1, 2, 7, 8, 9), 3), ((1, 2, 3, 4), 4)],
)
def test_the_longest_prefix_is_found_to_the_token(tree, tokens, expected):
    assert tree.longest_prefix(array(*tokens)) == expected


def test_adding_tells_what_was_known_and_keeps_shared_tokens_once(tree):
    assert tree.num_tokens == 5
    assert tree.add(array(1, 2, 3, 9)) == 3
    assert (tree.num_tokens, tree.longest_prefix(array(1, 2, 3, 4)), tree.longest_prefix(array(1, 2, 3, 9))) == (
        6,
        4,
        4,
    )


def test_it_agrees_with_a_comparison_with_every_sequence():
    draw = random.Random(0)
    tree, added = PrefixTree(), []
    for _ in range(400):
        tokens = draw.choices(range(3), k=draw.randrange(12))
        expected = max((shared(tokens, other) for other in added), default=0)
        assert tree.longest_prefix(array(*tokens)) == tree.add(array(*tokens)) == expected
        added.append(tokens)
    assert tree.num_tokens == len({tuple(tokens[: i + 1]) for tokens in added for i in range(len(tokens))})


def shared(left, right) -> int:
    length = 0
    while length < min(len(left), len(right)) and left[length] == right[length]:
        length += 1
    return length
