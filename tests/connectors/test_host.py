"""The memory tier: a budget, and what is dropped when it is used up."""

import pytest

from hybrid_engine.connectors.host import HostTier
from hybrid_engine.transfer_plan import BlockKey

PLAIN, WINDOW = 0, 1


def key(name: str, group_id: int = PLAIN) -> BlockKey:
    return BlockKey(group_id, name.encode())


def make_host(budget: int, *names: str) -> HostTier:
    host = HostTier(budget)
    for name in names:
        host.put(key(name), b"x" * 10, is_dear=False)
    return host


def test_the_least_recently_used_thing_is_dropped_for_a_new_one():
    host = make_host(30, "a", "b", "c")
    host.get(key("a"))
    assert host.put(key("d"), b"x" * 10, is_dear=False) == [key("b")]
    assert host.num_bytes == 30


def test_windows_and_states_outlive_full_attention_that_was_used_later():
    host = HostTier(30)
    host.put(key("window", WINDOW), b"x" * 10, is_dear=True)
    for name in "abc":
        host.put(key(name), b"x" * 10, is_dear=False)
    assert list(host) == [key("b"), key("c"), key("window", WINDOW)]


def test_windows_and_states_beyond_half_of_the_budget_are_dropped_before_full_attention():
    host = make_host(40, "a")
    for name in "uvwx":
        host.put(key(name, WINDOW), b"x" * 10, is_dear=True)
    assert list(host) == [key("a"), *(key(name, WINDOW) for name in "vwx")]


@pytest.mark.parametrize("is_dear", [False, True])
def test_a_thing_larger_than_the_budget_is_dropped_at_once_and_nothing_else_is(is_dear):
    host = make_host(30, "a")
    assert host.put(key("big"), b"x" * 31, is_dear=is_dear) == [key("big")]
    assert list(host) == [key("a")]


def test_putting_a_thing_again_counts_its_bytes_once():
    host = make_host(30, "a", "a")
    assert host.num_bytes == 10
    host.discard(key("a"))
    assert (host.num_bytes, host.get(key("a"))) == (0, None)


def test_asking_for_a_size_does_not_count_as_use():
    host = make_host(20, "a", "b")
    assert host.size(key("a")) == 10
    assert host.put(key("c"), b"x" * 10, is_dear=False) == [key("a")]
