"""What two rules of the scheduler are worth, counted in steps and tokens on a runner that computes nothing.

Nothing here depends on the machine: the same figures come out everywhere.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.spec import FullAttentionSpec, group_layers
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_builder import StepBuilder
from hybrid_engine.step_plan import StepPlan, StepResult

BUDGET = 2048
NUM_STEPS = 2000
ARRIVALS_PER_STEP = 1.5
"""With prompts of 1,000 tokens on average and answers of 100, four fifths of what the budget could do."""
FLOOD_PROMPTS, FLOOD_TOKENS, FLOOD_BLOCKS, FLOOD_BUDGET = 40, 2048, 300, 512


class WaitingFirst(Scheduler):
    """Admits waiting requests before it lets running ones go on, for comparison only."""

    def schedule(self) -> StepPlan:
        builder = StepBuilder(self.config)
        before = list(self.running)
        self._schedule_waiting(builder)
        admitted, self.running[:] = self.running[len(before) :], before
        self._schedule_running(builder)
        self.running.extend(admitted)
        return self._launch(builder)


def run() -> Iterator[Report]:
    """Count."""
    yield _starvation_report()
    yield _flood_report()


def _starvation_report() -> Report:
    figures = []
    for name, kind in (("running first", Scheduler), ("waiting first", WaitingFirst)):
        gaps = sorted(steps_between_tokens(kind))
        figures.append(Figure(f"{name}, 99th percentile", "steps between tokens", (gaps[len(gaps) * 99 // 100],)))
        figures.append(Figure(f"{name}, most", "steps between tokens", (gaps[-1],)))
    note = (
        f"{NUM_STEPS:,} steps of {BUDGET:,} tokens, {ARRIVALS_PER_STEP} prompts of 100 to 1,900 tokens arriving in each"
    )
    return Report("Decoding while prompts arrive", tuple(figures), (note,))


def steps_between_tokens(kind: type[Scheduler]) -> list[int]:
    """Return, for each token of an answer but its first, the steps since the one before."""
    draw = random.Random(0)
    scheduler = kind(SchedulerConfig(max_num_scheduled_tokens=BUDGET, max_num_seqs=1024), _coordinator(100_000))
    last_step: dict[str, int] = {}
    gaps: list[int] = []
    num_due = 0.0
    for step in range(NUM_STEPS):
        num_due += draw.expovariate(1 / ARRIVALS_PER_STEP)
        while num_due >= 1:
            num_due -= 1
            _add(scheduler, f"{step}.{num_due}", draw.randrange(100, 1900), max_tokens=100, draw=draw)
        for request_id in _step(scheduler):
            if request_id in last_step:
                gaps.append(step - last_step[request_id])
            last_step[request_id] = step
    return gaps


def _flood_report() -> Report:
    figures = []
    for name, must_fit in (("with the gate", True), ("without", False)):
        scheduler = _run_flood(full_sequence_must_fit=must_fit)
        useful = FLOOD_PROMPTS * (FLOOD_TOKENS + 63)
        share = useful / scheduler.stats.num_computed_tokens
        figures.append(Figure(f"{name}, work done", "tokens needed per token computed", (share,)))
        figures.append(Figure(f"{name}, preemptions", "", (scheduler.stats.num_preemptions,)))
    notes = (
        f"{FLOOD_PROMPTS} prompts of {FLOOD_TOKENS:,} tokens with answers of 64, all at once",
        f"{FLOOD_BLOCKS} blocks of 16 tokens, {FLOOD_BUDGET} tokens in a step",
    )
    return Report("A flood of prompts", tuple(figures), notes)


def _run_flood(*, full_sequence_must_fit: bool) -> Scheduler:
    config = SchedulerConfig(max_num_scheduled_tokens=FLOOD_BUDGET, full_sequence_must_fit=full_sequence_must_fit)
    scheduler = Scheduler(config, _coordinator(FLOOD_BLOCKS))
    draw = random.Random(0)
    for index in range(FLOOD_PROMPTS):
        _add(scheduler, str(index), FLOOD_TOKENS, max_tokens=64, draw=draw)
    while scheduler.has_unfinished_requests():
        _step(scheduler)
    return scheduler


def _coordinator(num_blocks: int) -> Coordinator:
    return Coordinator(group_layers({0: FullAttentionSpec(1, 64, 2)}), [num_blocks], config=CacheConfig())


def _add(scheduler: Scheduler, request_id: str, num_tokens: int, *, max_tokens: int, draw: random.Random) -> None:
    prompt = draw.choices(range(100_000), k=num_tokens)
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    hasher = scheduler.coordinator.hasher
    scheduler.add_request(Request(request_id, prompt, sampling, hasher=hasher, max_model_len=1 << 20))


def _step(scheduler: Scheduler) -> list[str]:
    """Run a step; return who got a token."""
    plan = scheduler.schedule()
    sampled = [request_id for request_id, due in zip(plan.request_ids, plan.is_sampled, strict=True) if due]
    scheduler.update(plan, StepResult(plan.step_id, dict.fromkeys(sampled, (1,))))
    return [str(request_id) for request_id in sampled]
