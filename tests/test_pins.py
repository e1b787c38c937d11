"""Pinned prefixes stay, and never so many that the longest request has no place."""

import pytest
from bookkeeping import Bench, full, hit_tokens, sliding, state

from hybrid_engine.errors import RequestError
from hybrid_engine.invariants import check_invariants
from hybrid_engine.pinning import Pin, pin_prefix

DOCUMENT = list(range(1000, 1040))
KINDS = {"full": [full()], "full and state": [full(), state()], "three kinds": [full(), sliding(20), state()]}


def make_bench(kinds: str, num_blocks: int = 30) -> Bench:
    return Bench(KINDS[kinds], num_blocks, eviction_policy="lru")


def pin(bench: Bench, tokens: list[int], max_model_len: int = 100) -> Pin:
    bench.run_one(tokens, "computed")
    pinned = pin_prefix(bench.scheduler, tokens, name="document", max_model_len=max_model_len)
    assert pinned is not None
    return pinned


def crowd(bench: Bench) -> None:
    """Let others take all the memory that they can have."""
    for i in range(20):
        bench.run_one([10_000 + 100 * i + j for j in range(90)], f"other {i}")


@pytest.mark.parametrize("kinds", KINDS)
def test_a_pinned_prefix_survives_any_crowd(kinds):
    bench = make_bench(kinds)
    assert pin(bench, DOCUMENT).num_tokens == 40
    crowd(bench)
    assert hit_tokens(bench.coordinator, [*DOCUMENT, 7]) == 40


@pytest.mark.parametrize("kinds", KINDS)
def test_once_unpinned_it_goes_like_all_others(kinds):
    bench = make_bench(kinds)
    bench.coordinator.pins.release(pin(bench, DOCUMENT).prefix)
    crowd(bench)
    assert hit_tokens(bench.coordinator, [*DOCUMENT, 7]) == 0
    assert all(usage.num_held == 0 for usage in bench.coordinator.usage())


@pytest.mark.parametrize("kinds", KINDS)
def test_a_pin_that_leaves_too_little_for_the_longest_request_is_refused(kinds):
    bench = make_bench(kinds)
    bench.run_one(DOCUMENT)
    with pytest.raises(RequestError, match="would take"):
        pin_prefix(bench.scheduler, DOCUMENT, name="document", max_model_len=470)
    check_invariants(bench.coordinator, [])
    assert bench.coordinator.pins.held == []


def test_the_longest_request_runs_beside_what_is_pinned():
    bench = make_bench("full and state")
    pin(bench, DOCUMENT, max_model_len=400)
    bench.run_one(list(range(399)), "longest")
    assert hit_tokens(bench.coordinator, [*DOCUMENT, 7]) == 40


def test_prefixes_that_share_blocks_pay_for_them_once():
    bench = make_bench("full")
    pin(bench, DOCUMENT)
    once = bench.coordinator.pins.num_blocks()
    pin(bench, [*DOCUMENT, 1, 2, 3])
    assert bench.coordinator.pins.num_blocks() == [once[0] + 1]


def test_what_is_not_cached_cannot_be_pinned():
    bench = make_bench("full and state")
    assert pin_prefix(bench.scheduler, DOCUMENT, name="document", max_model_len=100) is None


def test_a_reset_unpins_all():
    bench = make_bench("full and state")
    pinned = pin(bench, DOCUMENT)
    bench.coordinator.reset_prefix_cache()
    bench.coordinator.pins.release(pinned.prefix)
    check_invariants(bench.coordinator, [])
    assert all(usage.num_held == 0 for usage in bench.coordinator.usage())
