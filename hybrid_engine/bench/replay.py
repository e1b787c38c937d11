"""Replay of traces through the real coordinator and scheduler, with a runner that answers what the trace says.

Every prompt is submitted as it was, turn by turn; nothing is computed. What is hit is compared with the token-exact
bound: what a prefix tree of unlimited memory finds of each prompt among all that was submitted before it and the
answers that had ended by then. The bound counts the last token of a prompt never, since it is always computed.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from hybrid_engine.bench.prefix_tree import PrefixTree
from hybrid_engine.bench.rendering import Renderer, TokenCall
from hybrid_engine.bench.traces import Call
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError, PromptTooLongError
from hybrid_engine.explanation import CacheExplanation
from hybrid_engine.groups.layout import split_memory
from hybrid_engine.groups.spec import (
    ENDLESS,
    FullAttentionSpec,
    Group,
    LayerSpec,
    MambaSpec,
    SlidingWindowSpec,
    group_layers,
)
from hybrid_engine.plan import plan_memory
from hybrid_engine.request import Request
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.scheduler import RequestUpdate, Scheduler
from hybrid_engine.step_plan import StepPlan, StepResult

GROUP_KINDS = {
    "full": ("full",),
    "full+swa": ("full", "swa"),
    "full+state": ("full", "state"),
    "all": ("full", "swa", "state"),
}
MAX_MODEL_LEN = 2**30
"""As good as none: a trace's prompts are as long as they are."""


@dataclass(frozen=True)
class ReplaySettings:
    """With what kinds of memory, how much of it, and how many sessions at once a trace is replayed."""

    groups: str = "full+state"
    """A key of GROUP_KINDS; the layers of each kind together have the sizes of a small model, see `make_groups`."""
    memory_bytes: int | None = None
    """For all groups together; None: so much that nothing is ever given up."""
    block_size: int = 16
    window: int = 512
    concurrency: int = 1
    """Sessions at once; each submits its next call when the one before has ended."""
    step_tokens: int = 8192
    """Tokens computed in one step."""
    checkpoint_interval: int = 4096

    def __post_init__(self) -> None:
        if self.groups not in GROUP_KINDS:
            raise ConfigError(f"groups is {self.groups!r}, must be one of {', '.join(GROUP_KINDS)}")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}, must be at least 1 session")


@dataclass
class ReplayResult:
    """What a replay found."""

    settings: ReplaySettings
    memory_bytes: int = 0
    """Of all groups together, given or found to be ample."""
    num_requests: int = 0
    num_refused: int = 0
    """Prompts that could never fit in the memory; they count nowhere else."""
    num_prompt_tokens: int = 0
    num_answer_tokens: int = 0
    num_hit_tokens: int = 0
    num_bound_tokens: int = 0
    """What a prefix tree of unlimited memory finds."""
    num_last_tokens: int = 0
    """One of each prompt, always computed."""
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """By reason; with the hit and the last tokens they add up to the prompts."""
    num_computed_tokens: int = 0
    num_recomputed_tokens: int = 0
    """Of these, computed before and lost by a preemption."""
    num_preemptions: int = 0
    num_steps: int = 0
    seconds: float = 0.0
    """Spent in the bookkeeping: requests made and hashed, steps scheduled, answered and taken in."""
    processor_seconds: float = 0.0
    """The same without what other programs took of the processor meanwhile."""

    @property
    def hit_share_of_bound(self) -> float:
        """Hit tokens by those of the bound; 1 where nothing could be hit."""
        return self.num_hit_tokens / self.num_bound_tokens if self.num_bound_tokens else 1.0

    @property
    def prompt_tokens_per_second(self) -> float:
        """Prompt tokens, hit or computed, by the seconds of the bookkeeping."""
        return self.num_prompt_tokens / self.seconds

    @property
    def prompt_tokens_per_processor_second(self) -> float:
        """Prompt tokens, hit or computed, by the processor seconds of the bookkeeping."""
        return self.num_prompt_tokens / self.processor_seconds

    @property
    def requests_per_second(self) -> float:
        """Requests by the seconds of the bookkeeping."""
        return self.num_requests / self.seconds

    def take(self, explanation: CacheExplanation) -> None:
        """Count one prompt's tokens by what became of them."""
        self.num_prompt_tokens += explanation.num_prompt_tokens
        self.num_hit_tokens += explanation.hit
        self.num_last_tokens += explanation.LAST
        for reason, count in explanation.reasons().items():
            self.missed_tokens[reason] = self.missed_tokens.get(reason, 0) + count


class Stopwatch:
    """Seconds of this thread, on the wall and of the processor, but for what runs inside `paused`."""

    def __init__(self) -> None:
        self.seconds, self.processor_seconds = -time.perf_counter(), -time.thread_time()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what runs inside."""
        self.stop()
        try:
            yield
        finally:
            self.seconds -= time.perf_counter()
            self.processor_seconds -= time.thread_time()

    def stop(self) -> None:
        """Count no further."""
        self.seconds += time.perf_counter()
        self.processor_seconds += time.thread_time()


class NullRunner:
    """Computes nothing and answers what it was told to."""

    def __init__(self) -> None:
        self.answers: dict[str, Iterator[int]] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        """Return the next token of each request that samples."""
        answers, sampled = self.answers, zip(plan.request_ids, plan.is_sampled, strict=True)
        return StepResult(plan.step_id, {each: (next(answers[each]),) for each, is_sampled in sampled if is_sampled})


def replay(
    calls: Sequence[Call],
    make_renderer: Callable[[], Renderer],
    settings: ReplaySettings,
    *,
    on_request: Callable[[], object] = lambda: None,
) -> ReplayResult:
    """Replay calls and return what was found. on_request is called whenever one has ended.

    Raises ConfigError, or CapacityError when the memory is too small for anything.
    """
    groups, needs = make_groups(settings), survey(calls, make_renderer(), settings)
    if settings.memory_bytes is None:
        layout = split_memory(groups, ample_blocks(groups, needs, settings))
    else:
        layout = plan_memory(groups, settings.memory_bytes).layout
    config = CacheConfig(block_size=settings.block_size, checkpoint_interval=settings.checkpoint_interval)
    run = _Replay(Coordinator(groups, layout, config=config), make_renderer(), settings, on_request)
    run.result.memory_bytes = layout.num_bytes
    run.run(calls)
    return run.result


def make_groups(settings: ReplaySettings) -> tuple[Group, ...]:
    """Make the groups: one layer of each kind, 1 KiB a token in attention layers and 70 KiB a state."""
    sizes = {"num_kv_heads": 1, "head_size": 256, "element_bytes": 2, "block_size": settings.block_size}
    specs: dict[str, LayerSpec] = {
        "full": FullAttentionSpec(**sizes),
        "swa": SlidingWindowSpec(**sizes, window=settings.window),
        "state": MambaSpec((1024, 3), (1024, 16), conv_element_bytes=2),
    }
    return group_layers({index: specs[kind] for index, kind in enumerate(GROUP_KINDS[settings.groups])})


@dataclass(frozen=True)
class Needs:
    """What a trace would take if nothing were ever given up."""

    num_calls: int
    num_tokens: int
    """Of all prompts and answers, shared beginnings counted once."""
    num_checkpoints: int
    longest_tokens: int
    """Of one prompt and its answer."""


def survey(calls: Sequence[Call], renderer: Renderer, settings: ReplaySettings) -> Needs:
    """Find out what a trace would take."""
    tree, longest, num_checkpoints = PrefixTree(), 0, 0
    for call in calls:
        rendered = renderer.render(call)
        num_known = tree.add(_computed_tokens(rendered))
        longest = max(longest, len(rendered.prompt_token_ids) + len(rendered.answer_token_ids))
        # Ends of the prompt, of its last block and of the answer, a junction; messages and intervals in what is new.
        num_checkpoints += 5 + sum(end > num_known for end in rendered.message_boundaries)
    if settings.checkpoint_interval:
        num_checkpoints += tree.num_tokens // settings.checkpoint_interval
    return Needs(len(calls), tree.num_tokens, num_checkpoints, longest)


def ample_blocks(groups: Sequence[Group], needs: Needs, settings: ReplaySettings) -> list[int]:
    """Return blocks for each group with which nothing is ever given up, and little more."""
    # What runs at once may be computed twice; each call may begin with a copy of a partly filled block.
    running = (settings.concurrency + 1) * (needs.longest_tokens // settings.block_size + 1)
    num_token_blocks = needs.num_tokens // settings.block_size + 3 * needs.num_calls + running
    # A quarter of the states is not given to checkpoints that are laid on the way.
    num_states = 2 * (needs.num_checkpoints + settings.concurrency) + 16
    return [num_states if group.block_size == ENDLESS else num_token_blocks for group in groups]


def _computed_tokens(call: TokenCall) -> np.ndarray:
    """Return the tokens that a finished call has computed: all but the last, after which nothing comes."""
    return np.array([*call.prompt_token_ids, *call.answer_token_ids][:-1], np.int64)


class _Replay:
    """One replay while it goes on."""

    def __init__(
        self, coordinator: Coordinator, renderer: Renderer, settings: ReplaySettings, on_request: Callable[[], object]
    ) -> None:
        self.coordinator = coordinator
        self.renderer = renderer
        self.settings = settings
        self.result = ReplayResult(settings)
        self._on_request = on_request
        config = SchedulerConfig(max_num_seqs=settings.concurrency, max_num_scheduled_tokens=settings.step_tokens)
        self._scheduler = Scheduler(config, coordinator)
        self._runner = NullRunner()
        self._tree = PrefixTree()
        self._sessions: dict[str, deque[Call]] = {}
        """The calls still to come of each request in flight."""
        self._num_submitted = 0
        # Read a few times a request, not in each step: asking for the processor's time takes microseconds.
        self._stopwatch = Stopwatch()

    def run(self, calls: Sequence[Call]) -> None:
        sessions: dict[str, deque[Call]] = {}
        for call in calls:
            sessions.setdefault(call.session, deque()).append(call)
        waiting = deque(sessions.values())
        self._stopwatch = Stopwatch()
        while waiting or self._sessions:
            while waiting and len(self._sessions) < self.settings.concurrency:
                self._submit_next(waiting.popleft())
            for update in self._step():
                if update.finish_reason is not None:
                    self._submit_next(self._finish(update.request))
        self._stopwatch.stop()
        self._sum_up()

    def _sum_up(self) -> None:
        result, stats = self.result, self._scheduler.stats
        result.seconds, result.processor_seconds = self._stopwatch.seconds, self._stopwatch.processor_seconds
        result.num_steps = stats.num_steps
        result.num_computed_tokens = stats.num_computed_tokens
        result.num_recomputed_tokens = stats.num_recomputed_tokens
        result.num_preemptions = stats.num_preemptions

    def _submit_next(self, session: deque[Call]) -> None:
        """Submit the first call of a session that the memory can hold at all."""
        while session:
            with self._stopwatch.paused():
                call = self.renderer.render(session.popleft())
            if self._submit(call, session):
                return
            self.result.num_refused += 1
            self._on_request()

    def _submit(self, call: TokenCall, session: deque[Call]) -> bool:
        request = Request(
            str(self._num_submitted),
            call.prompt_token_ids,
            SamplingParams(max_tokens=len(call.answer_token_ids)),
            hasher=self.coordinator.hasher,
            max_model_len=MAX_MODEL_LEN,
            message_boundaries=call.message_boundaries,
        )
        try:
            self._scheduler.add_request(request)
        except PromptTooLongError:
            return False
        self._num_submitted += 1
        self._runner.answers[request.request_id] = iter(call.answer_token_ids)
        self._sessions[request.request_id] = session
        with self._stopwatch.paused():
            known = self._tree.add(np.array(call.prompt_token_ids, np.int64))
            self.result.num_bound_tokens += min(known, request.num_prompt_tokens - CacheExplanation.LAST)
        return True

    def _step(self) -> list[RequestUpdate]:
        plan = self._scheduler.schedule()
        return self._scheduler.update(plan, self._runner.execute(plan))

    def _finish(self, request: Request) -> deque[Call]:
        """Count a request that has ended; return its session."""
        assert request.cache is not None, f"{request} ended without a look-up"
        with self._stopwatch.paused():
            self.result.num_requests += 1
            self.result.num_answer_tokens += request.num_output_tokens
            self.result.take(request.cache)
            self._tree.add(np.array(request.token_ids[:-1], np.int64))
            self._on_request()
        del self._runner.answers[request.request_id]
        return self._sessions.pop(request.request_id)
