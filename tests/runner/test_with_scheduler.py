"""The real scheduler and coordinator over few blocks: hits, preemptions and small steps change no answer."""

import random

import pytest
import torch
from hand_plans import VOCAB_SIZE, DigestModel, digest_groups, expected_greedy

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.request import Request
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler

NUM_BLOCKS = 16


def random_requests(rng: random.Random, coordinator: Coordinator) -> list[Request]:
    """Requests that share prefixes of several lengths."""
    document = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    return [
        Request(
            str(i),
            document[: rng.randrange(1, 25)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 6))],
            SamplingParams(temperature=0, max_tokens=rng.randrange(1, 12)),
            hasher=coordinator.hasher,
            max_model_len=400,
        )
        for i in range(10)
    ]


@pytest.mark.parametrize("max_tokens", [5, 16, 64])
@pytest.mark.parametrize("seed", range(4))
def test_answers_are_those_of_each_request_alone_and_uncached(seed, max_tokens):
    groups = digest_groups()
    coordinator = Coordinator(groups, [NUM_BLOCKS] * 2)
    scheduler = Scheduler(SchedulerConfig(max_num_scheduled_tokens=max_tokens, max_num_seqs=6), coordinator)
    runner = ModelRunner(DigestModel(), groups, [NUM_BLOCKS] * 2)
    for group_id in range(2):
        runner.cache.poison(group_id, range(NUM_BLOCKS + 1), torch.nan)
    requests = random_requests(random.Random(seed), coordinator)
    for request in requests:
        scheduler.add_request(request)
    while scheduler.has_unfinished_requests():
        plan = scheduler.schedule()
        scheduler.update(plan, runner.execute(plan))
    for request in requests:
        prompt = request.token_ids[: request.num_prompt_tokens]
        assert request.output_token_ids == expected_greedy(prompt, request.sampling.max_tokens)
    assert sum(request.num_cached_tokens for request in requests) > 0
    assert runner.num_computed_tokens_total == scheduler.stats.num_computed_tokens
