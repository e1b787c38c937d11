"""How many requests run at once on one arena, beside the best split of the same memory that a search finds.

No split is right for all traffic: many short chats want states or windows, few long contexts want full attention. A
server that must be told the split is right for one of them. Here one arena gets no hint, the splits are searched anew
for each mix of requests, and each is charged what it needs to know in advance: nothing.

The waiting queue is never empty while it counts. Nothing is computed or shared: prompts differ, the cache is off.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from hybrid_engine.bench.geometry import CONFIGS, describe
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import CapacityError, PromptTooLongError
from hybrid_engine.groups.layout import MemoryLayout, share_memory, split_memory
from hybrid_engine.groups.spec import Group, group_layers
from hybrid_engine.plan import MemoryPlan
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import StepResult

MODELS = ("jamba-1.5-mini", "granite-4-h-small", "gemma-3-27b")
BLOCK_SIZE = 64
CHUNK = 2048
"""Tokens of one prompt in a step. The step itself has no limit: memory alone is to decide how many run."""
QUEUE = 100
"""Requests that wait, if there are so many left: more than a step could ever admit."""
WITHIN = 0.05
"""The arena is to run as many as the best split but for so large a share."""
FACTORS = (0.4, 0.6, 0.75, 0.87, 1.0, 1.15, 1.35, 1.7, 2.5)
"""First guesses of the search: the smaller group's bytes, by those that the mix takes on average."""


@dataclass(frozen=True)
class Shape:
    """A kind of request, its lengths drawn evenly."""

    prompt_tokens: tuple[int, int]
    answer_tokens: tuple[int, int]

    @property
    def mean_tokens(self) -> int:
        """Tokens of a request on average."""
        return (sum(self.prompt_tokens) + sum(self.answer_tokens)) // 2


SHORT = Shape((200, 3000), (100, 500))
LONG = Shape((80_000, 120_000), (300, 700))


@dataclass(frozen=True)
class Mix:
    """What requests come, one kind after the other in this proportion."""

    name: str
    shapes: tuple[Shape, ...]


# Of half and half, each kind has half of the tokens.
MIXES = (
    Mix("many short chats", (SHORT,)),
    Mix("few contexts of 100k", (LONG,)),
    Mix("half and half", (LONG, *(SHORT,) * (LONG.mean_tokens // SHORT.mean_tokens))),
)

NUM_REFINEMENTS = 2
MOST_RUNS = len(MODELS) * len(MIXES) * (1 + len(FACTORS) + 2 * NUM_REFINEMENTS)
"""Simulations of `run`."""


def run(*, memory_bytes: int, on_run: Callable[[], object] = lambda: None) -> Iterator[Report]:
    """Measure all mixes, model by model. on_run is called after each simulation."""
    for name in MODELS:
        groups = group_layers(describe(name, CONFIGS[name], block_size=BLOCK_SIZE).specs)
        figures = []
        for mix in MIXES:
            shared = concurrency(groups, share_memory(groups, memory_bytes), mix)
            on_run()
            best, share = search_split(groups, memory_bytes, mix, on_run=on_run)
            split = f"best split, {share:.1%} to the smaller group"
            figures.append(Figure(f"{mix.name}: one arena", "requests running", (shared,)))
            figures.append(Figure(f"{mix.name}: {split}", "requests running", (best,)))
            figures.append(Figure(f"{mix.name}: arena by best split", "x", (shared / best,), at_least=1 - WITHIN))
        notes = (
            f"{memory_bytes / 2**30:.0f} GiB of cache, blocks of {BLOCK_SIZE} tokens, prompts in chunks of {CHUNK:,}",
            "mean over the steps in which others wait; the split is searched for each mix, the arena is told nothing",
        )
        yield Report(f"Requests of {name} that run at once", tuple(figures), notes)


def concurrency(groups: Sequence[Group], layout: MemoryLayout, mix: Mix) -> float:
    """Return how many requests run on average while others wait."""
    scheduler = Scheduler(
        SchedulerConfig(max_num_seqs=1 << 20, max_num_scheduled_tokens=1 << 30, long_prefill_token_threshold=CHUNK),
        Coordinator(groups, layout, config=CacheConfig(block_size=BLOCK_SIZE, enable_prefix_caching=False)),
    )
    requests, num_left = _requests(mix, scheduler), num_requests(groups, layout.num_bytes, mix)
    num_measured = num_left // 2
    total = num_steps = 0
    while num_left:
        while num_left and scheduler.num_waiting < QUEUE:
            num_left -= 1
            scheduler.add_request(next(requests))
        plan = scheduler.schedule()
        due = [each for each, is_due in zip(plan.request_ids, plan.is_sampled, strict=True) if is_due]
        scheduler.update(plan, StepResult(plan.step_id, dict.fromkeys(due, (1,))))
        if scheduler.num_waiting and num_left < num_measured:
            total += scheduler.num_running
            num_steps += 1
    return total / num_steps


def num_requests(groups: Sequence[Group], memory_bytes: int, mix: Mix) -> int:
    """Return how many requests a simulation takes: the memory is filled with them three times over."""
    return QUEUE + max(40, 3 * memory_bytes // sum(mean_bytes(groups, mix)))


def mean_bytes(groups: Sequence[Group], mix: Mix) -> list[int]:
    """Return the bytes that a request of a mix takes in each group on average, half of its answer there."""
    plan = MemoryPlan(tuple(groups), share_memory(groups, 1 << 40), 1 << 40)
    sizes = [plan.request_bytes(shape.mean_tokens, chunk_tokens=1) for shape in mix.shapes]
    return [sum(size[group.group_id] for size in sizes) // len(sizes) for group in groups]


def search_split(
    groups: Sequence[Group], memory_bytes: int, mix: Mix, *, on_run: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Return the most requests that any split found runs, and the smaller group's share of the memory in it."""
    assert len(groups) == 2, f"the search knows two groups, these are {len(groups)}"
    means = mean_bytes(groups, mix)
    small = means.index(min(means))
    typical = means[small] / sum(means)
    found: dict[float, float] = {}

    def measure(share: float) -> None:
        if not 0 < share < 1 or share in found:
            return
        found[share] = _split_concurrency(groups, memory_bytes, mix, small, share)
        on_run()

    for factor in FACTORS:
        measure(factor * typical)
    for _ in range(NUM_REFINEMENTS):
        shares = sorted(found)
        best = shares.index(max(found, key=lambda share: found[share]))
        for neighbour in (best - 1, best + 1):
            if 0 <= neighbour < len(shares):
                measure((shares[best] + shares[neighbour]) / 2)
    share = max(found, key=lambda share: found[share])
    return found[share], share


def _split_concurrency(groups: Sequence[Group], memory_bytes: int, mix: Mix, small: int, share: float) -> float:
    shares = [share if index == small else 1 - share for index in range(2)]
    counts = [
        max(1, int(memory_bytes * part) // group.block_bytes - 1) for group, part in zip(groups, shares, strict=True)
    ]
    try:
        return concurrency(groups, split_memory(groups, counts), mix)
    except (CapacityError, PromptTooLongError):
        # The longest request of the mix doesn't fit: no split for it.
        return 0.0


def _requests(mix: Mix, scheduler: Scheduler) -> Iterator[Request]:
    draw, number = random.Random(0), 0
    while True:
        for shape in mix.shapes:
            prompt = range(number << 20, (number << 20) + draw.randint(*shape.prompt_tokens))
            sampling = SamplingParams(max_tokens=draw.randint(*shape.answer_tokens), ignore_eos=True)
            hasher = scheduler.coordinator.hasher
            yield Request(str(number), prompt, sampling, hasher=hasher, max_model_len=1 << 30)
            number += 1
