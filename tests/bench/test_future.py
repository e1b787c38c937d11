"""Who knows the future: a use falls to the longest checkpoint that is left for it, and goes back when it returns."""

import math

from bookkeeping import Bench, full, state

from hybrid_engine.bench.future import ClairvoyantPolicy, Future

DOCUMENT = list(range(1000, 1064))
LONG = [*DOCUMENT, *range(2000, 2064)]


def asked(bench: Bench, prompt: list[int], name: str):
    return bench.run_one(prompt, name)


def known_future() -> Future:
    """The document, what goes on from it, and that once more; then the policy is asked before the third call."""
    bench, future = Bench([full(), state()], [200, 100], hash_key=b"one"), Future()
    for turn, prompt in enumerate(([*DOCUMENT, 1], [*LONG, 1], [*LONG, 1, 2, 3])):
        future.note_call(("s", turn))
        request = asked(bench, prompt, str(turn))
        future.note_use(("s", turn), request, unit_tokens=bench.coordinator.match_unit_tokens)
    future.restart()
    return future


def test_a_use_falls_to_the_checkpoint_before_the_one_that_is_gone_and_goes_back():
    future = known_future()
    policy = ClairvoyantPolicy(future)
    bench = Bench([full(), state()], [200, 100], eviction=policy, hash_key=b"one")
    asked(bench, [*DOCUMENT, 1], "0")
    asked(bench, [*LONG, 1], "1")
    future.pass_call(("s", 0))
    future.pass_call(("s", 1))
    index = bench.coordinator.checkpoints
    coming = {each: policy.num_calls_until_use(each) for each in index}
    (used,) = [each for each, calls in coming.items() if calls < math.inf]
    shorter = index.facts.tree.ancestor(used)
    index.forget(used)
    assert policy.num_calls_until_use(shorter) == 1
    asked(bench, [*LONG, 1], "again")
    assert policy.num_calls_until_use(shorter) == math.inf
    assert [policy.num_calls_until_use(each) for each in index].count(1) == 1
