"""Random traffic on small pools, with all that can happen at once: every stream is what it would be alone.

Arrivals, lengths, priorities, aborts, stop tokens, steps in flight, drafts that are right or wrong, and loads that come
late or fail. The fake device checks what every request reads and every state it goes on from, and the books must agree
after each call.
"""

import os
import random

import pytest
from bookkeeping import Bench, expected_stream, full, sliding, state
from fakes import FakeConnector, FakeDrafter

from hybrid_engine.config import EVICTION_POLICIES
from hybrid_engine.groups.spec import group_layers

# Of the slow stage, over all kinds together: more of it, or other runs, by the environment.
NUM_LONG_RUNS = int(os.environ.get("TRAFFIC_RUNS", "2400"))
FIRST_SEED = int(os.environ.get("TRAFFIC_SEED", "0"))
NUM_QUICK_RUNS = 25

GROUPS = {
    "full": [full(4)],
    "full and window": [full(4), sliding(10, 4)],
    "full and state": [full(4), state()],
    "three kinds": [full(4), sliding(10, 8), state()],
    "odd sizes": [full(4), full(3), sliding(10, 2), state(40)],
}


def random_prompt(rng: random.Random) -> list[int]:
    """Prompts share prefixes with each other, and part at any token."""
    base = [rng.randrange(2) for _ in range(rng.randrange(1, 4))]
    stem = list(range(100, 100 + rng.choice([3, 8, 17, 30])))
    return [*stem, *base, *range(200, 200 + rng.choice([0, 1, 5, 12]))]


def make_bench(rng: random.Random, specs, *, is_shared: bool) -> Bench:
    draft_slots = rng.randrange(4)
    drafter = FakeDrafter(right=0.6, guesses=rng.choice([0.3, 1.0]), rng=rng) if draft_slots else None
    connector = None
    if rng.random() < 0.4:
        connector = FakeConnector(
            rng.choice([8, 30, 60]), delay_steps=rng.randrange(6), fails=rng.random() / 2, rng=rng
        )
    num_blocks = rng.randrange(14, 40)
    if is_shared:
        memory = {"memory_bytes": sum(num_blocks * group.block_bytes for group in group_layers(dict(enumerate(specs))))}
    else:
        memory = {"num_blocks": num_blocks}
    return Bench(
        specs,
        **memory,
        rng=rng if rng.random() < 0.7 else None,
        drafter=drafter,
        connector=connector,
        async_depth=rng.randrange(3),
        draft_slots=draft_slots,
        max_num_scheduled_tokens=rng.choice([1, 5, 16, 64]),
        max_num_batched_tokens=rng.choice([None, None, draft_slots + rng.choice([1, 4, 20])]),
        max_num_seqs=rng.choice([1, 2, 5]),
        long_prefill_token_threshold=rng.choice([0, 0, 3]),
        full_sequence_must_fit=rng.random() < 0.5,
        watermark=rng.choice([0, 0.1]),
        reserved_blocks=rng.choice([0, 0, 1]),
        policy=rng.choice(["fcfs", "priority"]),
        ageing_steps=rng.choice([0, 5, 1000]),
        max_overtaken_steps=rng.choice([0, 2, 32]),
        enable_prefix_caching=rng.random() < 0.9,
        checkpoint_interval=rng.choice([0, 7]),
        eviction_policy=rng.choice(EVICTION_POLICIES),
        block_size=4,
    )


def run_traffic(seed: int, specs, *, is_shared: bool) -> Bench:
    rng = random.Random(seed)
    bench = make_bench(rng, specs, is_shared=is_shared)
    requests = []
    for i in range(rng.randrange(1, 12)):
        for _ in range(rng.randrange(4)):
            bench.step()
        stops = (rng.randrange(50),) if rng.random() < 0.3 else ()
        prompt, max_tokens = random_prompt(rng), rng.randrange(1, 20)
        priority = rng.randrange(3)
        requests.append(bench.add(prompt, f"r{i}", max_tokens=max_tokens, stop_token_ids=stops, priority=priority))
        if rng.random() < 0.15:
            bench.scheduler.abort_request(rng.choice(requests).request_id)
        if rng.random() < 0.05:
            bench.coordinator.reset_prefix_cache()
    bench.run(max_steps=3000)
    let_loads_end(bench)
    for request in requests:
        check_stream(bench, request)
    assert all(usage.num_held == 0 for usage in bench.coordinator.usage())
    return bench


def let_loads_end(bench: Bench) -> None:
    """Loads of requests that were aborted hold their blocks until they have ended."""
    for _ in range(20):
        bench.launch()


def check_stream(bench: Bench, request) -> None:
    prompt = request.token_ids[: request.num_prompt_tokens]
    stream = expected_stream(prompt, request.max_total_tokens - request.num_prompt_tokens)
    stops = [i for i, token_id in enumerate(stream) if token_id in request.sampling.stop_token_ids]
    if stops:
        stream = stream[: stops[0] + 1]
    reported = bench.streams.get(request.request_id, [])
    assert reported == request.output_token_ids
    if request.finish_reason == "abort":
        assert reported == stream[: len(reported)]
    else:
        assert reported == stream
        assert request.finish_reason == ("stop" if stops else "length")


@pytest.mark.parametrize("is_shared", [False, True], ids=["pools", "arena"])
@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_every_stream_is_what_it_would_be_alone(specs, is_shared):
    for seed in range(1000, 1000 + NUM_QUICK_RUNS):
        run_traffic(seed, specs, is_shared=is_shared)


@pytest.mark.slow
@pytest.mark.parametrize("is_shared", [False, True], ids=["pools", "arena"])
@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_long_traffic_keeps_every_stream(specs, is_shared):
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_LONG_RUNS // (2 * len(GROUPS))):
        run_traffic(seed, specs, is_shared=is_shared)
