"""A mapping that forgets what was not set for long."""

from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hybrid_engine.recent import RecentDict


def test_what_was_set_last_is_kept():
    recent = RecentDict(4)
    for key in range(100):
        recent[key] = -key
        kept = list(recent)
        assert kept == list(range(key + 1))[-len(kept) :]
        assert min(2, key + 1) <= len(kept) <= 4
    assert [recent[key] for key in recent] == [-key for key in recent]


def test_an_entry_set_again_is_young_again():
    recent = RecentDict(4)
    for key in "abca":
        recent[key] = key
    for key in "de":
        recent[key] = key
    assert "a" in recent
    assert "b" not in recent


def test_what_is_deleted_or_cleared_is_gone():
    recent = RecentDict(4)
    for key in "abc":
        recent[key] = key
    del recent["a"], recent["c"]
    assert list(recent) == ["b"]
    with pytest.raises(KeyError):
        recent["a"]
    recent.clear()
    assert len(recent) == 0
    assert "b" not in recent


@given(st.integers(2, 9), st.lists(st.tuples(st.sampled_from("sd"), st.integers(0, 12))))
def test_it_agrees_with_a_list_of_all_that_was_set(max_entries, steps):
    recent, all_set = RecentDict(max_entries), OrderedDict()
    for number, (kind, key) in enumerate(steps):
        if kind == "s":
            recent[key] = all_set[key] = number
            all_set.move_to_end(key)
        elif key in recent:
            del recent[key], all_set[key]
        assert len(recent) <= max_entries
        assert dict(recent) == {each: all_set[each] for each in recent}
        assert set([*all_set][-(max_entries // 2) :]) <= set(recent)
