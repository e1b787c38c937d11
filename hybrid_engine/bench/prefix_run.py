"""One run of a prefix benchmark: a workload through the real coordinator and scheduler, on a clock of its own.

A step takes as long as its runner says: by a roofline, or as measured. Calls come when the workload says, or as fast as
they can. What is hit is compared with what a cache of unlimited memory would have hit in the same order of calls.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, repeat
from operator import add
from typing import Any, Protocol

from hybrid_engine.bench.future import Future
from hybrid_engine.bench.geometry import Geometry
from hybrid_engine.bench.infinite import InfiniteCache
from hybrid_engine.bench.prefix_result import PrefixRun, RunSettings
from hybrid_engine.bench.recording import Recorder, orphan_bytes
from hybrid_engine.bench.sessions import Sessions
from hybrid_engine.bench.token_free import BlockNames, NamedTokens, NameHasher, TokenFreeRequest
from hybrid_engine.bench.workload import BlockPrompt, WorkItem
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError, PromptTooLongError
from hybrid_engine.explanation import CacheExplanation
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.groups.spec import ENDLESS, Group, group_layers
from hybrid_engine.plan import plan_memory
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import Scheduler
from hybrid_engine.step_plan import RequestId, StepPlan, StepResult

PACES = ("trace", "fast")
MAX_MODEL_LEN = 2**30
"""As good as none: a workload's prompts are as long as they are."""
UNLIMITED = 0
"""As a memory size: so much that nothing is ever given up."""
DEFAULT_POLICY = "lru"
MAX_STEPS_AT_ONCE = 32
"""Requests take the memory of so many tokens before their time, at most."""
EVICTED_KEYS = 2**22
"""Keys remembered of what was given up: enough to tell it from what was never seen in a trace of many hours."""


class Runner(Protocol):
    """Runs steps, and says how long each took."""

    def begin(self, request: Request, answer: Iterator[int]) -> None:
        """Take in a request; its answer is this, whatever is computed."""

    def execute(self, plan: StepPlan, *, most_steps: int, most_s: float) -> StepResult:
        """Run a step; the result says how long it took.

        most_steps, most_s: so many steps, and so much time, in which nothing happens but that each request of the plan
        gets one more token; whoever only pretends may do several of these at once.
        """

    def end(self, request: Request) -> None:
        """Forget a request that has ended."""


class Clock(Protocol):
    """Says how long steps take."""

    def seconds(self, positions: tuple[int, ...], num_new: tuple[int, ...], num_sampled: int) -> float:
        """Return how long a step takes. By request: tokens before those that it computes, and how many these are."""


class ModelledRunner:
    """Computes nothing: answers what it was told to, and takes as long as the clock says.

    Steps in which every request gets one more token, and nobody else waits, are made several at once: the requests
    get their tokens together, and the time of all of them has passed. The next step then has several tokens of each
    to compute, of which all but the last are paid for.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._answers: dict[str, Iterator[int]] = {}
        self._num_paid: dict[str, int] = {}
        """Tokens of each request that were given before their time, and whose time has passed."""

    def begin(self, request: Request, answer: Iterator[int]) -> None:
        self._answers[request.request_id] = answer
        self._num_paid[request.request_id] = 0

    def execute(self, plan: StepPlan, *, most_steps: int, most_s: float) -> StepResult:
        seconds, num_steps = self._pay(plan), 1
        if most_steps > 1:
            # In the middle of them, requests are longer by half of what they get.
            ends = tuple(map(add, plan.num_computed_tokens, plan.num_scheduled_tokens))
            middle = tuple([end + most_steps // 2 for end in ends])
            step_s = self._clock.seconds(middle, (1,) * len(ends), len(ends))
            in_time = (most_s - seconds) / step_s if step_s else math.inf
            num_steps = 1 + int(max(0, min(most_steps - 1, in_time)))
            seconds += (num_steps - 1) * step_s
            self._num_paid.update(dict.fromkeys(plan.request_ids, num_steps - 1))
        sampled: dict[RequestId, tuple[int, ...]] = {
            each: tuple(islice(self._answers[each], num_steps))
            for each, is_sampled in zip(plan.request_ids, plan.is_sampled, strict=True)
            if is_sampled
        }
        return StepResult(plan.step_id, sampled, seconds=seconds)

    def _pay(self, plan: StepPlan) -> float:
        """Return how long a step takes without what is paid for."""
        positions, counts = list(plan.num_computed_tokens), list(plan.num_scheduled_tokens)
        for index, request_id in enumerate(plan.request_ids):
            if num_paid := min(self._num_paid[request_id], counts[index]):
                self._num_paid[request_id] -= num_paid
                positions[index] += num_paid
                counts[index] -= num_paid
        if not any(counts):
            return 0.0
        return self._clock.seconds(tuple(positions), tuple(counts), sum(plan.is_sampled))

    def end(self, request: Request) -> None:
        del self._answers[request.request_id]
        del self._num_paid[request.request_id]


@dataclass(frozen=True)
class Needs:
    """What a workload takes if nothing is ever given up."""

    num_tokens: int
    """Of all prompts and answers, shared beginnings counted once."""
    num_calls: int
    num_boundaries: int
    """Ends of messages in what was new in its prompt."""
    longest_tokens: int
    """Of one prompt and its answer."""
    block_tokens: int | None
    """Tokens in the blocks that prompts are known by; None: prompts are tokens."""

    def working_set_bytes(self, geometry: Geometry) -> int:
        """Return the bytes of the working set.

        The keys and values of every distinct token where attention reaches back to the beginning; elsewhere, for each
        call, what it takes to go on from its end: a window, a state.
        """
        total = self.num_calls * geometry.state_bytes
        for cost in geometry.attention:
            num_keys = self.num_tokens if cost.reach_tokens is None else self.num_calls * cost.reach_tokens
            total += num_keys * cost.bytes_per_key
        return total


def survey(items: Sequence[WorkItem]) -> Needs:
    """Find out what a workload takes. Raises ConfigError when its prompts are known by blocks of different sizes."""
    sizes = {item.prompt.block_tokens if isinstance(item.prompt, BlockPrompt) else None for item in items}
    if len(sizes) != 1:
        found = ", ".join(sorted(f"{size} tokens" if size else "tokens themselves" for size in sizes))
        raise ConfigError(f"the prompts are known by different things: {found}; replay one trace at a time")
    cache, naming, longest, num_boundaries = InfiniteCache(), Naming(items), 0, 0
    for item, following in naming.in_order():
        prompt, answer = naming.tokens(item, following)
        tokens = prompt if isinstance(prompt, NamedTokens) else [*prompt, *answer]
        total = len(prompt) + item.num_answer_tokens
        num_known = cache.add(tokens, total - 1)
        num_boundaries += sum(end > num_known for end in item.message_boundaries)
        longest = max(longest, total)
    return Needs(cache.num_tokens, len(items), num_boundaries, longest, sizes.pop())


class Naming:
    """Makes the tokens of a workload's calls, real ones or named by their blocks."""

    def __init__(self, items: Sequence[WorkItem]) -> None:
        self._items = items
        self._names = BlockNames()
        self._unknown = count(-1, -1)

    def in_order(self) -> Iterator[tuple[WorkItem, WorkItem | None]]:
        """Iterate over the calls, each with the one that follows it in its session."""
        following: dict[int, WorkItem] = {}
        last: dict[str, int] = {}
        for index, item in enumerate(self._items):
            if item.session in last:
                following[last[item.session]] = item
            last[item.session] = index
        for index, item in enumerate(self._items):
            yield item, following.get(index)

    def tokens(self, item: WorkItem, following: WorkItem | None) -> tuple[list[int] | NamedTokens, Sequence[int]]:
        """Return a call's prompt and its answer; that of a prompt known by blocks stands with the prompt."""
        if isinstance(item.prompt, BlockPrompt):
            shown = following.prompt if following and isinstance(following.prompt, BlockPrompt) else None
            return self._names.tokens(item.session, item.prompt, item.num_answer_tokens, shown), ()
        answer = item.answer
        if answer is None:
            answer = [next(self._unknown) for _ in range(item.num_answer_tokens)]
        return item.prompt.token_ids(), answer


HASH_KEY = b"bench"
"""Runs that are compared name prefixes alike."""


def make_coordinator(
    geometry: Geometry, settings: RunSettings, needs: Needs, policy: EvictionPolicy | None = None
) -> Coordinator:
    """Return a coordinator with the run's memory, all that the workload takes where that is UNLIMITED.

    policy: instead of the one that the settings name. Raises CapacityError when the memory is too small for anything.
    """
    groups = group_layers(dict(geometry.specs))
    config = CacheConfig(
        block_size=settings.block_size,
        checkpoint_interval=settings.checkpoint_interval,
        max_evicted_keys=EVICTED_KEYS,
        hash_key=HASH_KEY,
        eviction_policy=settings.policy if policy is None else DEFAULT_POLICY,
    )
    memory_bytes = settings.memory_bytes
    if memory_bytes == UNLIMITED:
        memory_bytes = _ample_bytes(groups, settings, needs)
    return Coordinator(groups, plan_memory(groups, memory_bytes).layout, config=config, policy=policy)


def _ample_bytes(groups: Sequence[Group], settings: RunSettings, needs: Needs) -> int:
    """Return bytes with which nothing is ever given up; what isn't used costs nothing."""
    num_running = 2 * settings.concurrency + 17
    # What runs at once may be computed twice; each call may begin with a copy of a partly filled block.
    running = num_running * (needs.longest_tokens // settings.block_size + 1)
    num_token_blocks = needs.num_tokens // settings.block_size + 3 * needs.num_calls + running
    num_checkpoints = 5 * needs.num_calls + needs.num_boundaries + num_running
    if settings.checkpoint_interval:
        num_checkpoints += needs.num_tokens // settings.checkpoint_interval
    blocks = [num_checkpoints if group.block_size == ENDLESS else num_token_blocks for group in groups]
    # Some of the memory is not given to checkpoints that are laid on the way.
    return 2 * sum((count + 64) * group.block_bytes for count, group in zip(blocks, groups, strict=True))


class Run:
    """One run while it goes on."""

    def __init__(
        self,
        items: Sequence[WorkItem],
        settings: RunSettings,
        coordinator: Coordinator,
        runner: Runner,
        *,
        recorded: Future | None = None,
        future: Future | None = None,
        on_request: Callable[[], object] = lambda: None,
    ) -> None:
        """on_request is called whenever a call has ended.

        recorded: is told where each call was hit. future: is told of each call that is submitted.
        """
        self.settings = settings
        self._coordinator = coordinator
        self._runner = runner
        self._on_request = on_request
        self._recorded = recorded
        self._future = future
        self._num_calls: dict[str, int] = {}
        """By session: calls submitted or refused."""
        self._naming = Naming(items)
        self._hasher = NameHasher(coordinator.match_unit_tokens)
        self._sessions = Sessions(items, concurrency=settings.concurrency, keeps_pace=settings.pace == "trace")
        # Sub-agents come on top.
        most = settings.max_num_seqs or 2 * settings.concurrency + 16
        config = SchedulerConfig(max_num_seqs=most, max_num_scheduled_tokens=settings.step_tokens)
        self._scheduler = Scheduler(config, coordinator)
        self._recorder = Recorder(coordinator)
        self._infinite = InfiniteCache()
        self._now = 0.0
        coordinator.checkpoints.facts.clock = lambda: self._now
        self._num_steps = 0
        self._in_flight: dict[str, tuple[str, int, float]] = {}
        """By request: its session, which of its calls it is, and when it was submitted."""
        self._first_token_s: dict[str, float] = {}
        self._num_submitted = 0

    def run(self) -> PrefixRun:
        """Replay everything."""
        start = time.thread_time()
        while True:
            self._submit_due()
            if self._in_flight:
                self._step()
            elif (next_time := self._sessions.next_time) is not None:
                self._now = max(self._now, next_time)
            else:
                break
        return self._result(time.thread_time() - start)

    def _submit_due(self) -> None:
        for item, following in self._sessions.take_due(self._now):
            if not self._submit(item, following):
                self._recorder.totals.num_refused += 1
                self._sessions.end(item.session, self._now)
                self._on_request()

    def _submit(self, item: WorkItem, following: WorkItem | None) -> bool:
        turn = self._num_calls.get(item.session, 0)
        self._num_calls[item.session] = turn + 1
        if self._recorded is not None:
            self._recorded.note_call((item.session, turn))
        if self._future is not None:
            self._future.pass_call((item.session, turn))
        tokens, answer = self._naming.tokens(item, following)
        request = self._make_request(item, tokens)
        try:
            self._scheduler.add_request(request)
        except PromptTooLongError:
            return False
        self._num_submitted += 1
        self._in_flight[request.request_id] = item.session, turn, self._now
        self._runner.begin(request, iter(answer) if answer else repeat(0))
        known = self._infinite.add(tokens, request.num_prompt_tokens)
        self._recorder.totals.num_infinite_tokens += min(known, request.num_prompt_tokens - CacheExplanation.LAST)
        return True

    def _make_request(self, item: WorkItem, tokens: list[int] | NamedTokens) -> Request:
        name, sampling = str(self._num_submitted), SamplingParams(max_tokens=item.num_answer_tokens, ignore_eos=True)
        common: dict[str, Any] = {
            "max_model_len": MAX_MODEL_LEN,
            "arrival_time": self._now,
            "message_boundaries": item.message_boundaries,
        }
        if isinstance(tokens, NamedTokens):
            return TokenFreeRequest(name, tokens, sampling, hasher=self._hasher, **common)
        return Request(name, tokens, sampling, hasher=self._coordinator.hasher, **common)

    def _step(self) -> None:
        plan = self._scheduler.schedule()
        most_s = math.inf if self._sessions.next_time is None else self._sessions.next_time - self._now
        result = self._runner.execute(plan, most_steps=self._most_steps(plan), most_s=most_s)
        self._now += result.seconds
        if not all(plan.is_sampled):
            # Some are in the middle of a prompt: the step is about computing tokens.
            cost = self._coordinator.checkpoints.facts.cost
            cost.note_step(plan.num_computed_tokens, plan.num_scheduled_tokens, result.seconds)
        self._num_steps += len(next(iter(result.sampled.values()), (0,)))
        for update in self._scheduler.update(plan, result):
            request_id = update.request.request_id
            if request_id not in self._first_token_s:
                self._first_token_s[request_id] = self._now
            if update.finish_reason is not None:
                self._finish(update.request)

    def _most_steps(self, plan: StepPlan) -> int:
        """Return in how many steps from now on each request of the plan will just get one more token."""
        running = self._scheduler.running
        if self._scheduler.num_waiting or not all(plan.is_sampled) or len(plan.request_ids) < len(running):
            return 1
        # A first token has a time of its own; and a last one is alone, so that all before it are computed.
        if any(request.num_output_tokens == 0 for request in running):
            return 1
        left = min(request.max_total_tokens - request.num_tokens for request in running) - 1
        return max(1, min(left, MAX_STEPS_AT_ONCE))

    def _finish(self, request: Request) -> None:
        session, turn, submitted_s = self._in_flight.pop(request.request_id)
        first_token_s = self._first_token_s.pop(request.request_id)
        assert request.cache is not None, f"{request} ended without a look-up"
        self._recorder.take(request.cache, request.num_output_tokens, first_token_s - submitted_s)
        self._recorder.sample(self._now, self._scheduler.num_running, self._scheduler.num_waiting)
        tokens = request.token_ids
        self._infinite.add(tokens, len(tokens) - 1)
        if self._recorded is not None:
            unit = self._coordinator.match_unit_tokens
            self._recorded.note_use((session, turn), request, unit_tokens=unit)
        self._runner.end(request)
        self._sessions.end(session, self._now)
        self._on_request()

    def _result(self, processor_s: float) -> PrefixRun:
        self._recorder.finish()
        totals, stats = self._recorder.totals, self._scheduler.stats
        totals.num_steps = self._num_steps
        totals.num_computed_tokens = stats.num_computed_tokens
        totals.num_recomputed_tokens = stats.num_recomputed_tokens
        totals.num_preemptions = stats.num_preemptions
        totals.max_orphan_bytes = orphan_bytes(self._coordinator)
        totals.makespan_s = self._now
        totals.processor_s = processor_s
        return PrefixRun(self.settings, totals, self._recorder.series)
