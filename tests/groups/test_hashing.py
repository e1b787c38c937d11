import pytest

from hybrid_engine.groups.hashing import BlockHasher


def hashes(token_ids, *, unit=4, key=b"k", **root):
    hasher, result = BlockHasher(unit, key=key), []
    hasher.extend(result, hasher.root(**root), token_ids)
    return result


def test_only_complete_units_have_a_hash():
    assert [len(hashes(range(n))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_hashes_that_grow_token_by_token_equal_those_made_at_once():
    hasher, grown = BlockHasher(4, key=b"k"), []
    for end in range(1, 20):
        hasher.extend(grown, hasher.root(), list(range(end)))
    assert grown == hashes(range(19))


def test_a_hash_stands_for_the_whole_prefix():
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[1] != hashes([0, 2, 3, 4, 5, 6, 7, 8])[1]
    assert hashes([1, 2, 3, 4, 5, 6, 7, 8])[0] == hashes([1, 2, 3, 4, 0, 0, 0, 0])[0]


@pytest.mark.parametrize(
    "other",
    [{"cache_salt": "y"}, {"adapter": "x"}, {}, {"cache_salt": "xadapter"}, {"key": b"other", "cache_salt": "x"}],
)
def test_salt_adapter_and_key_never_meet(other):
    assert hashes(range(4), **other) != hashes(range(4), cache_salt="x")


def test_without_a_key_each_process_draws_its_own():
    assert BlockHasher(4).root() != BlockHasher(4).root()
