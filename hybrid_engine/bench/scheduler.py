"""What the bookkeeping costs, on the real scheduler with a runner that computes nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator

from hybrid_engine.bench import traffic
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.hashing import BlockHasher
from hybrid_engine.groups.spec import (
    FullAttentionSpec,
    Group,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
    group_layers,
)
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import StepPlan, StepResult

BLOCK_SIZE = 16
WINDOW = 512
PROMPT_TOKENS = 1024
"""Above the window, so that decoding passes window blocks as it does in long chats."""
STEPS_IN_ROUND = 64
"""Four blocks of each request: full blocks are registered, new ones taken, passed ones given back."""
LONG_PROMPT_TOKENS = 131_072
VOCAB_SIZE = 262_144
UNIT = "µs per request and step"
TWO_GROUPS = "full + sliding window"
THREE_GROUPS = "all three"
GROUP_KINDS = {
    "full": ("full",),
    TWO_GROUPS: ("sliding", "full"),
    "full + state": ("full", "state"),
    THREE_GROUPS: ("sliding", "full", "state"),
}
GOALS = {(TWO_GROUPS, 256): 8.0, (THREE_GROUPS, 1024): 10.0}
"""Microseconds, by kinds of group and requests running."""
CONTEXTS = (1_024, 65_536)

Clock = Callable[[], float]


def run(*, num_rounds: int = 5) -> Iterator[Report]:
    """Measure steps, lookups and hashing."""
    yield _step_report(num_rounds)
    yield _lookup_report(num_rounds)
    yield from traffic.run()


def _step_report(num_rounds: int) -> Report:
    cases = [(kinds, num_running) for kinds in GROUP_KINDS for num_running in (1, 16, 64, 256, 1024)]
    figures = [_step_figure(*case, num_rounds, time.perf_counter) for case in cases]
    for kinds, num_running in GOALS:
        figures.append(_step_figure(kinds, num_running, num_rounds, time.thread_time, " (processor time)"))
    for prompt_tokens in CONTEXTS:
        seconds = time_steps(make_groups(GROUP_KINDS[THREE_GROUPS]), 16, num_rounds, prompt_tokens=prompt_tokens)
        name = f"{THREE_GROUPS}, 16 running, contexts of {prompt_tokens:,} tokens"
        figures.append(Figure(name, UNIT, tuple(each / 16 * 1e6 for each in seconds)))
    notes = (
        f"schedule + update while all requests decode; {STEPS_IN_ROUND} steps a round, prompts of {PROMPT_TOKENS:,}",
        f"blocks of {BLOCK_SIZE} tokens, window {WINDOW}; processor time leaves out what other programs took",
    )
    return Report("Scheduling", tuple(figures), notes)


def _step_figure(kinds: str, num_running: int, num_rounds: int, clock: Clock, suffix: str = "") -> Figure:
    layers = GROUP_KINDS[kinds]
    seconds = time_steps(make_groups(layers), num_running, num_rounds, clock=clock)
    values = tuple(each / num_running * 1e6 for each in seconds)
    name = f"{kinds}, {num_running:,} running{suffix}"
    return Figure(name, UNIT, values, at_most=GOALS.get((kinds, num_running)))


def make_groups(layers: tuple[str, ...]) -> tuple[Group, ...]:
    """Make the groups of a model with these layers, each 'full', 'sliding' or 'state'."""
    sizes = {"num_kv_heads": 1, "head_size": 256, "element_bytes": 2, "block_size": BLOCK_SIZE}
    specs: dict[str, LayerSpec] = {
        "full": FullAttentionSpec(**sizes),
        "sliding": SlidingWindowSpec(**sizes, window=WINDOW),
        "state": MambaSpec((1024, 3), (1024, 16), conv_element_bytes=2),
    }
    return group_layers({index: specs[layer] for index, layer in enumerate(layers)})


def execute_nothing(plan: StepPlan) -> StepResult:
    """Answer token 1 for every request that samples."""
    sampled = zip(plan.request_ids, plan.is_sampled, strict=True)
    return StepResult(plan.step_id, {request_id: (1,) for request_id, is_sampled in sampled if is_sampled})


def time_steps(
    groups: tuple[Group, ...],
    num_running: int,
    num_rounds: int,
    *,
    prompt_tokens: int = PROMPT_TOKENS,
    clock: Clock = time.perf_counter,
) -> list[float]:
    """Return the seconds of schedule + update per step, for each round, while num_running requests decode."""
    # Blocks for all prompts and answers in every group: nothing is preempted.
    num_blocks = num_running * (prompt_tokens + (num_rounds + 1) * STEPS_IN_ROUND) // BLOCK_SIZE + num_running
    coordinator = Coordinator(groups, [num_blocks] * len(groups), config=CacheConfig(block_size=BLOCK_SIZE))
    config = SchedulerConfig(max_num_seqs=num_running, max_num_scheduled_tokens=PROMPT_TOKENS * 16, watermark=0.0)
    scheduler = Scheduler(config, coordinator)
    draw = random.Random(0)
    for index in range(num_running):
        # Lengths differ, so that blocks fill up in different steps, as they do in life.
        prompt = draw.choices(range(VOCAB_SIZE), k=prompt_tokens - index % BLOCK_SIZE)
        scheduler.add_request(make_request(str(index), prompt, coordinator))
    while scheduler.num_waiting or any(r.num_computed_tokens < r.num_prompt_tokens for r in scheduler.running):
        plan = scheduler.schedule()
        scheduler.update(plan, execute_nothing(plan))
    assert scheduler.num_running == num_running, f"{scheduler.num_running} of {num_running} requests run"
    return [_time_round(scheduler, clock) for _ in range(num_rounds)]


def make_request(request_id: str, prompt: list[int], coordinator: Coordinator) -> Request:
    """Make a request that goes on for as long as it is let."""
    sampling = SamplingParams(max_tokens=None, ignore_eos=True)
    return Request(request_id, prompt, sampling, hasher=coordinator.hasher, max_model_len=2**30)


def _time_round(scheduler: Scheduler, clock: Clock) -> float:
    seconds = 0.0
    for _ in range(STEPS_IN_ROUND):
        start = clock()
        plan = scheduler.schedule()
        seconds += clock() - start
        result = execute_nothing(plan)
        start = clock()
        scheduler.update(plan, result)
        seconds += clock() - start
    return seconds / STEPS_IN_ROUND


def _lookup_report(num_rounds: int) -> Report:
    draw = random.Random(1)
    prompt = draw.choices(range(VOCAB_SIZE), k=LONG_PROMPT_TOKENS)
    longer_prompt = [*prompt, *draw.choices(range(VOCAB_SIZE), k=100)]
    figures = []
    for kinds, layers in GROUP_KINDS.items():
        coordinator = cache_prompt(make_groups(layers), prompt)
        request = make_request("again", longer_prompt, coordinator)
        found = tuple(_time_finding(coordinator, request) * 1e6 for _ in range(num_rounds))
        clocks = {"": time.perf_counter, " (processor time)": time.thread_time}
        figures.append(Figure(f"{kinds}, length of the hit", "µs", found, at_most=100))
        for suffix, clock in clocks.items():
            pinned = tuple(_time_pinning(coordinator, request, clock) * 1e3 for _ in range(num_rounds))
            figures.append(Figure(f"{kinds}, blocks listed and pinned{suffix}", "ms", pinned, at_most=2))
    hashed = tuple(_time_hashing(prompt) * 1e6 / LONG_PROMPT_TOKENS for _ in range(num_rounds))
    figures.append(Figure("hashing", "µs per token", hashed))
    note = f"a cached prompt of {LONG_PROMPT_TOKENS:,} tokens comes again with 100 more, its hashes known"
    return Report("Prefix lookup", tuple(figures), (note,))


def cache_prompt(groups: tuple[Group, ...], prompt: list[int]) -> Coordinator:
    """Return a coordinator in which a finished request has left this prompt."""
    num_blocks = 2 * len(prompt) // BLOCK_SIZE
    coordinator = Coordinator(groups, [num_blocks] * len(groups), config=CacheConfig(block_size=BLOCK_SIZE))
    scheduler = Scheduler(SchedulerConfig(max_num_scheduled_tokens=8192), coordinator)
    scheduler.add_request(make_request("first", prompt, coordinator))
    while not (plan := scheduler.schedule()).is_sampled[0]:
        scheduler.update(plan, execute_nothing(plan))
    scheduler.update(plan, execute_nothing(plan))
    scheduler.abort_request("first")
    return coordinator


def _time_finding(coordinator: Coordinator, request: Request) -> float:
    num_repeats = 100
    start = time.perf_counter()
    for _ in range(num_repeats):
        hit = coordinator.lookup.find_longest_cache_hit(request)
    seconds = time.perf_counter() - start
    assert hit.num_computed_tokens == LONG_PROMPT_TOKENS, f"the hit is {hit.num_computed_tokens} tokens"
    return seconds / num_repeats


def _time_pinning(coordinator: Coordinator, request: Request, clock: Clock) -> float:
    start = clock()
    hit, blocks = coordinator.look_up(request)
    is_taken = coordinator.allocate_slots(
        request,
        100,
        num_new_computed_tokens=hit.num_computed_tokens,
        new_computed_blocks=blocks,
        partial_blocks=hit.checkpoint.blocks if hit.checkpoint else (),
    )
    seconds = clock() - start
    assert is_taken, "there is no place for the request"
    coordinator.free(request)
    return seconds


def _time_hashing(prompt: list[int]) -> float:
    hasher = BlockHasher(BLOCK_SIZE)
    start = time.perf_counter()
    hasher.extend([], hasher.root(), prompt)
    return time.perf_counter() - start
