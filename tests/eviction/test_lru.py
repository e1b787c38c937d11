"""Plain recency, and what every policy is built on."""

import random

from bookkeeping import Bench, full, state

from hybrid_engine.eviction.heap import ValueHeap
from hybrid_engine.groups.checkpoints import Checkpoint


def make_checkpoint(position: int) -> Checkpoint:
    return Checkpoint(position, b"", (), ())


def test_the_heap_gives_the_least_value_after_any_changes():
    rng, heap, values = random.Random(1), ValueHeap(), {}
    checkpoints = [make_checkpoint(i) for i in range(20)]
    for _ in range(3000):
        checkpoint = rng.choice(checkpoints)
        if rng.random() < 0.3:
            heap.discard(checkpoint)
            values.pop(checkpoint, None)
        else:
            values[checkpoint] = rng.random()
            heap.put(checkpoint, values[checkpoint])
        expected = min(values, key=values.get) if values else None
        assert heap.least() == ((expected, values[expected]) if expected else None)
        assert len(heap) == len(values)


def positions(bench: Bench) -> set[int]:
    return {checkpoint.position for checkpoint in bench.coordinator.checkpoints}


def test_the_least_recently_used_checkpoint_goes_first():
    bench = Bench([full(), state()], [60, 12], eviction_policy="lru")
    for i, length in enumerate((5, 8, 11)):
        bench.run_one([100 * i] * length, str(i))
    bench.run_one([0] * 5 + [9], "again")
    assert bench.coordinator.checkpoints.give_up_one()
    assert 8 not in positions(bench)
    assert {5, 6, 11} == positions(bench)


def test_giving_up_ends_when_nothing_is_left():
    bench = Bench([full(), state()], [60, 12])
    bench.run_one([1] * 20)
    checkpoints = bench.coordinator.checkpoints
    while checkpoints.give_up_one():
        pass
    assert not list(checkpoints)
    assert all(usage.num_cached == 0 for usage in bench.coordinator.usage())


def test_what_a_running_request_laid_is_not_given_up():
    bench = Bench([full(), state()], [60, 12])
    request = bench.add([1] * 20, max_tokens=30)
    while request.num_output_tokens < 5:
        bench.step()
    while bench.coordinator.checkpoints.give_up_one():
        pass
    assert positions(bench) == {16, 20}


def test_without_states_there_is_no_checkpoint_to_give_up():
    bench = Bench([full()], [60])
    bench.run_one([1] * 20)
    assert not bench.coordinator.checkpoints.give_up_one()
