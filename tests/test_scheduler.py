"""Random traffic on small pools: every stream is what it would be without a cache, and the books agree throughout."""

import os
import random

import pytest
from bookkeeping import Bench, chunked, expected_stream, full, sliding, state
from hypothesis import given, settings
from hypothesis import strategies as st

from hybrid_engine.errors import PromptTooLongError
from hybrid_engine.request import RequestStatus

# Of the slow stage, for each kind of group: more of it, or other runs, by the environment.
NUM_LONG_RUNS = int(os.environ.get("TRAFFIC_RUNS", "700"))
FIRST_SEED = int(os.environ.get("TRAFFIC_SEED", "0"))

GROUPS = {
    "full": [full(4)],
    "full and window": [full(4), sliding(10, 4)],
    "two block sizes": [full(4), sliding(7, 8), full(8)],
    "window only": [sliding(9, 4)],
    "full and chunked": [full(4), chunked(12, 4)],
    "full and state": [full(4), state()],
    "three kinds": [full(4), sliding(10, 8), state()],
    "state only": [state()],
}


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts share prefixes with each other, and part at any token."""
    base = [rng.randrange(2) for _ in range(rng.randrange(1, 4))]
    stem = list(range(100, 100 + rng.choice([3, 8, 17, 30])))
    return [*stem, *base, *range(200, 200 + rng.choice([0, 1, 5, 12]))]


def run_traffic(seed: int, specs, num_blocks: int) -> Bench:
    rng = random.Random(seed)
    bench = Bench(
        specs,
        num_blocks,
        max_num_scheduled_tokens=rng.choice([1, 5, 16, 64]),
        max_num_seqs=rng.choice([1, 2, 5]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        full_sequence_must_fit=rng.random() < 0.5,
        watermark=rng.choice([0, 0.1]),
        enable_prefix_caching=rng.random() < 0.9,
        checkpoint_interval=rng.choice([0, 7]),
        block_size=4,
    )
    requests = []
    for i in range(rng.randrange(1, 12)):
        for _ in range(rng.randrange(4)):
            if bench.scheduler.has_unfinished_requests():
                bench.step()
        requests.append(bench.add(random_prompt(rng), f"r{i}", max_tokens=rng.randrange(1, 15)))
        if rng.random() < 0.15:
            bench.scheduler.abort_request(rng.choice(requests).request_id)
        if rng.random() < 0.05:
            bench.coordinator.reset_prefix_cache()
    bench.run(max_steps=3000)
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_stream(prompt, request.num_output_tokens)
        assert request.finish_reason in ("abort", "length")
        assert request.finish_reason == "abort" or request.num_tokens == request.max_total_tokens
    assert all(usage.num_held == 0 for usage in bench.coordinator.usage())
    return bench


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32), num_blocks=st.integers(16, 40))
def test_every_stream_is_what_it_would_be_without_a_cache(specs, seed, num_blocks):
    run_traffic(seed, specs, num_blocks)


@pytest.mark.slow
@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_long_traffic_keeps_every_stream(specs):
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_LONG_RUNS):
        run_traffic(seed, specs, 14 + seed % 30)


def test_random_traffic_does_hit_and_does_preempt():
    benches = [run_traffic(seed, GROUPS["full and window"], 16) for seed in range(40)]
    assert sum(bench.scheduler.stats.num_preemptions for bench in benches) > 0
    assert sum(len(plan.block_copies) for bench in benches for plan in bench.plans) > 0
    started = [request for bench in benches for plan in bench.plans for request in plan.started]
    assert any(request.num_computed_tokens > 0 for request in started)


def test_a_preempted_request_computes_only_its_last_token_again_while_memory_lasts():
    bench = Bench([full(), sliding(32)], [20, 40], full_sequence_must_fit=False, watermark=0)
    first = bench.add(range(150), "first", max_tokens=60)
    last = bench.add(range(1000, 1150), "last", max_tokens=60)
    while last.num_preemptions == 0:
        bench.step()
    bench.scheduler.abort_request("first")
    known = last.num_tokens
    bench.step()
    assert first.finish_reason == "abort"
    assert bench.plans[-1].started[0].num_computed_tokens >= known - 1 - 16
    bench.run()
    assert last.output_token_ids == expected_stream(range(1000, 1150), 60)


def test_nothing_is_admitted_in_a_step_that_preempts():
    bench = Bench([full()], 8, full_sequence_must_fit=False, watermark=0)
    bench.add(range(60), "first", max_tokens=20)
    bench.add(range(100, 160), "last", max_tokens=20)
    while bench.scheduler.stats.num_preemptions == 0:
        bench.step()
    assert bench.plans[-1].started == ()


def test_an_aborted_request_frees_its_blocks_at_once():
    bench = Bench([full(), sliding(32)], 30)
    running = bench.add(range(40), "running", max_tokens=50)
    bench.step()
    waiting = bench.add(range(40), "waiting")
    for request_id in ("running", "waiting", "unknown"):
        bench.scheduler.abort_request(request_id)
    assert [usage.num_held for usage in bench.coordinator.usage()] == [0, 0]
    assert (running.finish_reason, waiting.finish_reason) == ("abort", "abort")
    assert not bench.scheduler.has_unfinished_requests()


def test_a_refused_request_leaves_the_others_alone():
    bench = Bench([full()], 10)
    request = bench.add(range(100), "fits", max_tokens=5)
    with pytest.raises(PromptTooLongError):
        bench.add(range(161), "too long")
    bench.run()
    assert request.num_output_tokens == 5


def test_a_stop_token_ends_the_answer_but_not_before_min_tokens():
    stream = expected_stream(range(20), 30)
    stop = stream[4]
    bench = Bench([full()], 10)
    early = bench.run_one(range(20), max_tokens=30, stop_token_ids=(stop,))
    assert (early.finish_reason, early.stop_reason) == ("stop", stop)
    assert early.output_token_ids == stream[: stream.index(stop) + 1]
    late = bench.run_one(range(20), max_tokens=30, stop_token_ids=(stop,), min_tokens=20)
    assert late.num_output_tokens >= 20


def test_a_stop_string_found_by_the_engine_ends_the_request():
    bench = Bench([full()], 10)
    request = bench.add(range(20), max_tokens=30)
    bench.step()
    bench.scheduler.finish_request(request.request_id, "\n\n")
    assert (request.status, request.finish_reason, request.stop_reason) == (RequestStatus.FINISHED, "stop", "\n\n")
    bench.run()


def test_a_request_that_wants_prompt_logprobs_computes_its_whole_prompt():
    bench = Bench([full()], 10)
    bench.run_one(range(40))
    request = bench.run_one(range(40), prompt_logprobs=0)
    assert (request.cache.hit, request.cache.disabled) == (0, 39)
    assert bench.plans[-1].num_tokens == 40


def test_different_salts_never_hit():
    bench = Bench([full()], 20)
    bench.run_one(range(40))
    salted = bench.add(range(40), "salted")
    plain_root = salted.root_hash
    assert bench.coordinator.hasher.root(cache_salt="tenant") != plain_root
    bench.run()
    assert salted.cache.hit == 32
