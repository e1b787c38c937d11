"""Value: chance of reuse x seconds to rebuild / bytes. And the same scenes under the other policies."""

import random

import pytest
from bookkeeping import Bench, full, hit_tokens, state

from hybrid_engine.config import EVICTION_POLICIES
from hybrid_engine.invariants import check_invariants

SYSTEM = list(range(1000, 1096))


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def make_bench(policy: str, num_blocks=(60, 16), **config) -> tuple[Bench, Clock]:
    bench, clock = Bench([full(), state()], list(num_blocks), eviction_policy=policy, **config), Clock()
    bench.coordinator.checkpoints.facts.clock = clock
    return bench, clock


def positions(bench: Bench) -> set[int]:
    return {checkpoint.position for checkpoint in bench.coordinator.checkpoints}


def ask(bench: Bench, clock: Clock, prompt: list[int], name: str) -> int:
    clock.now += 1
    return bench.run_one(prompt, name).cache.hit


def hits_under_one_off_requests(policy: str) -> int:
    """Ask with a system prompt now and then, amid many prompts that come once and take all the memory."""
    bench, clock = make_bench(policy)
    rng = random.Random(0)
    hits = 0
    for i in range(400):
        if i % 25 < 3:
            hits += ask(bench, clock, [*SYSTEM, i, i, i], f"system {i}") >= 96
        else:
            ask(bench, clock, [rng.randrange(2000, 1_000_000) for _ in range(50)], f"other {i}")
    return hits


def test_a_shared_system_prompt_survives_one_off_requests():
    assert hits_under_one_off_requests("valued") >= 40  # of 48


def test_under_lru_each_pause_loses_it():
    assert hits_under_one_off_requests("lru") <= 32  # the two after the first of three


def test_what_takes_long_to_rebuild_stays_for_its_bytes():
    bench, clock = make_bench("valued", num_blocks=(200, 40))
    ask(bench, clock, list(range(300)), "long")
    ask(bench, clock, [5000 + i for i in range(3)], "short")
    clock.now += 1000
    assert bench.coordinator.checkpoints.give_up_one()
    assert 3 not in positions(bench)


def test_recency_decides_between_equals():
    bench, clock = make_bench("valued", num_blocks=(200, 40))
    for i in range(3):
        ask(bench, clock, [100 * i] * 5, str(i))
    clock.now += 100
    assert bench.coordinator.checkpoints.give_up_one()
    assert hit_tokens(bench.coordinator, [0] * 5 + [9]) == 0
    assert hit_tokens(bench.coordinator, [200] * 5 + [9]) == 5


def test_own_bytes_grow_when_the_neighbour_that_shared_them_goes():
    bench, _ = make_bench("valued", num_blocks=(200, 40))
    bench.run_one([*SYSTEM, 1, 1, 1], "first")
    bench.run_one([*SYSTEM, 2, 2, 2], "second")
    index = bench.coordinator.checkpoints
    second = next(each for each in index if each.tail == (2, 2, 2))
    before = index.facts.own_bytes(second)
    for other in [each for each in index if each is not second]:
        index.forget(other)
    token_bytes, state_bytes = (bench.coordinator.groups[i].block_bytes / (16, 1)[i] for i in range(2))
    # States, and the partly filled block; then the six blocks of the system prompt too.
    assert before == state_bytes + 16 * token_bytes
    assert index.facts.own_bytes(second) == state_bytes + (16 + 96) * token_bytes


def test_flop_aware_spares_what_others_part_from():
    bench, clock = make_bench("flop_aware", num_blocks=(200, 40))
    for i in range(3):
        ask(bench, clock, [*SYSTEM, i, i, i], str(i))
    while len(positions(bench)) > 1:
        bench.coordinator.checkpoints.give_up_one()
    assert positions(bench) == {96}


def test_pinned_ones_are_never_named():
    bench, clock = make_bench("valued", num_blocks=(200, 40))
    ask(bench, clock, SYSTEM, "system")
    index = bench.coordinator.checkpoints
    for checkpoint in index:
        index.pin(checkpoint)
    assert not index.give_up_one()
    index.unpin(next(iter(index)))
    assert index.give_up_one()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_any_order_of_events_keeps_the_books(policy):
    rng = random.Random(3)
    bench, clock = make_bench(policy, num_blocks=(40, 12), checkpoint_interval=16)
    for i in range(60):
        clock.now += rng.random() * 10
        stem = SYSTEM[: rng.choice([0, 20, 48, 96])]
        bench.run_one([*stem, *(rng.randrange(2) for _ in range(rng.randrange(1, 80)))], str(i), max_tokens=3)
        for _ in range(rng.randrange(3)):
            bench.coordinator.checkpoints.give_up_one()
        check_invariants(bench.coordinator, [])
        tree, index = bench.coordinator.checkpoints.facts.tree, bench.coordinator.checkpoints
        for checkpoint in index:
            ancestor = tree.ancestor(checkpoint)
            assert ancestor is None or (ancestor.position < checkpoint.position and index.is_recorded(ancestor))
