"""Steps that begin before the tokens of the step before are known: no answer changes."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hand_plans import DigestModel, digest_groups, expected_greedy

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.request import Request
from hybrid_engine.runner.ahead import UNKNOWN
from hybrid_engine.runner.graphs import Decoded, DecodeGraphs
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.runner.sampler import greedy_tokens
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_pipeline import StepPipeline

NUM_BLOCKS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=9)
KINDS = {
    "greedy": [GREEDY],
    "drawn": [SamplingParams(temperature=30.0, max_tokens=8), SamplingParams(temperature=20.0, top_p=0.9)],
    "some by the host": [GREEDY, SamplingParams(temperature=30.0, presence_penalty=1.0, max_tokens=4)],
    "stopped by a token": [SamplingParams(temperature=30.0, max_tokens=12, stop_token_ids=tuple(range(0, 60, 5)))],
}


class Unrecorded:
    """Takes the place of DecodeGraphs on a CPU: the same steps, without a graph."""

    covers = DecodeGraphs.covers

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self.num_unknown = 0

    def run(self, plan) -> Decoded:
        packed = self.runner._batch.pack(plan)
        self.num_unknown += int((packed.token_ids_T == UNKNOWN).sum())
        logits_RV = self.runner.decode_logits(packed)
        return Decoded(packed, logits_RV, greedy_tokens(logits_RV))


def answers(kinds: list[SamplingParams], seed: int, depth: int) -> tuple[list[list[int]], list[list[int]], int]:
    """Prompts, answers, and how many tokens steps took from the device."""
    rng, groups = random.Random(seed), digest_groups()
    coordinator = Coordinator(groups, [NUM_BLOCKS] * 2)
    config = SchedulerConfig(max_num_scheduled_tokens=16, max_num_seqs=5, async_depth=depth)
    scheduler, runner = Scheduler(config, coordinator), ModelRunner(DigestModel(), groups, [NUM_BLOCKS] * 2)
    for group_id in range(2):
        runner.cache.poison(group_id, range(NUM_BLOCKS + 1), torch.nan)
    runner._graphs = unrecorded = Unrecorded(runner)
    runner._draws_on_device = True
    options = {"hasher": coordinator.hasher, "max_model_len": 400}
    prompts = [[rng.randrange(60) for _ in range(rng.randrange(1, 30))] for _ in range(8)]
    requests = [Request(str(i), prompt, kinds[i % len(kinds)], **options) for i, prompt in enumerate(prompts)]
    for request in requests:
        scheduler.add_request(request)
    pipeline = StepPipeline(runner, depth=depth)
    while scheduler.has_unfinished_requests() or pipeline.num_launched:
        while scheduler.has_unfinished_requests() and not pipeline.is_full:
            plan = scheduler.schedule()
            if not plan.request_ids:
                break
            pipeline.launch(plan)
        scheduler.update(*pipeline.take())
    return prompts, [request.output_token_ids for request in requests], unrecorded.num_unknown


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("name", KINDS)
def test_answers_are_those_of_steps_one_by_one(name, depth):
    prompts, found, num_unknown = answers(KINDS[name], 3, depth)
    assert found == answers(KINDS[name], 3, 0)[1]
    assert num_unknown > 0, "no step began before the one before was known"
    if name == "greedy":
        assert found == [expected_greedy(prompt, 9) for prompt in prompts]


def test_a_request_that_left_its_row_learns_nothing():
    groups = digest_groups()
    runner = ModelRunner(DigestModel(), groups, [NUM_BLOCKS] * 2)
    runner._batch._samplings[0] = newcomer = object()
    runner._batch._token_ids[0, :3] = 5, 6, 7
    runner._batch.learn_tokens(np.array([0]), [object()], [1], [60])
    assert runner._batch._token_ids[0, :3].tolist() == [5, 6, 7]
    runner._batch.learn_tokens(np.array([0]), [newcomer], [1], [60])
    assert runner._batch._token_ids[0, :3].tolist() == [5, 60, 7]
