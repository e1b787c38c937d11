"""Random traffic over random tiers: things get lost, loads come late, requests are aborted. No wrong hit, ever."""

import os
import random

import pytest
from bookkeeping import expected_stream, full, sliding, state
from tiers import TierBench

from hybrid_engine.groups.spec import group_layers
from hybrid_engine.request import RequestStatus

KINDS = [
    [full(4)],
    [full(4), sliding(12, 4)],
    [full(4), sliding(10, 8), state()],
    [full(8), state()],
    [sliding(9, 4), state()],
    [state(), state(16)],
]
NUM_RUNS = int(os.environ.get("TRAFFIC_RUNS", "700"))
FIRST_SEED = int(os.environ.get("TRAFFIC_SEED", "0"))


class Traffic:
    """Prompts that share beginnings with one another and with earlier answers, on a device too small for them."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        specs = rng.choice(KINDS)
        counts = [rng.randint(14, 26) for _ in specs]
        groups = group_layers(dict(enumerate(specs)))
        memory_bytes = sum(count * group.block_bytes for count, group in zip(counts, groups, strict=True))
        memory = {"memory_bytes": memory_bytes} if seed % 2 else {"num_blocks": counts}
        self.bench = TierBench(
            specs,
            **memory,
            host_slots=rng.choice([0, 40, 400, 100_000]),
            loses=rng.choice([0, 0, 0.02, 0.3]),
            delay_steps=rng.choice([0, 1, 4]),
            seed=seed,
            rng=random.Random(seed) if rng.random() < 0.5 else None,
            block_size=4,
            checkpoint_interval=rng.choice([0, 8]),
            max_num_scheduled_tokens=rng.choice([5, 16, 64]),
            max_num_seqs=rng.randint(1, 5),
            async_depth=rng.randint(0, 2),
        )
        # Fetching is sometimes believed to be too slow.
        if rng.random() < 0.2:
            self.bench.tiers.rates.note_step(1000, 1e-3)
            self.bench.tiers.rates.note_load({"host": 100}, rng.choice([1e-3, 1.0]))
        self.texts = [[rng.randrange(50) for _ in range(rng.randint(5, 40))] for _ in range(4)]
        self.requests = []

    def run(self, num_requests: int) -> None:
        for number in range(num_requests):
            self.add(f"r{number}")
            for _ in range(self.rng.choice([0, 0, 1, 3, 20])):
                self.bench.step()
            self.disturb()
        self.bench.run()
        for request, prompt in self.requests:
            answer = request.output_token_ids
            assert request.status is RequestStatus.FINISHED
            assert request.finish_reason == "abort" or len(answer) == request.sampling.max_tokens
            assert answer == expected_stream(prompt, len(answer))

    def add(self, request_id: str) -> None:
        text = self.rng.choice(self.texts)
        own = [self.rng.randrange(50) for _ in range(self.rng.choice([0, 0, 1, 7]))]
        prompt = (text[: self.rng.randint(1, len(text))] if self.rng.random() < 0.3 else text)[:44] + own
        request = self.bench.add(prompt, request_id, max_tokens=self.rng.randint(1, 5))
        self.requests.append((request, prompt))

    def disturb(self) -> None:
        chance = self.rng.random()
        if chance < 0.1:
            request, _ = self.rng.choice(self.requests)
            self.bench.scheduler.abort_request(request.request_id)
        elif chance < 0.13:
            self.bench.coordinator.reset_prefix_cache()
            self.bench.tiers.reset()
        elif chance < 0.4:
            # A conversation goes on.
            request, prompt = self.rng.choice(self.requests)
            self.texts[self.rng.randrange(4)] = [*prompt, *request.output_token_ids][:40]


@pytest.mark.parametrize("seed", range(25))
def test_random_traffic_over_random_tiers_answers_as_if_there_were_none(seed):
    Traffic(seed).run(25)


@pytest.mark.slow
def test_much_random_traffic_over_random_tiers_answers_as_if_there_were_none():
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_RUNS):
        Traffic(seed).run(25)


def test_the_random_traffic_saves_and_loads_and_loses():
    runs = [Traffic(seed) for seed in range(100, 110)]
    for traffic in runs:
        traffic.run(25)
    assert sum(traffic.bench.device.num_loaded for traffic in runs) > 10
    assert sum(traffic.bench.scheduler.loads.num_failed for traffic in runs) > 2
    assert sum(bool(traffic.bench.tiers.num_not_fetched_tokens) for traffic in runs) > 0
