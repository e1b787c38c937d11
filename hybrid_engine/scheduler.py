"""What runs in the next step: running requests first, then waiting ones with what the budget leaves.

No torch here: the scheduler sees tokens and blocks, and hands out a StepPlan. Up to `async_depth` steps may be launched
before the oldest one's result is taken in. Of each request it then knows three positions:

    [0, computed)                    its steps have finished: what the cache holds for certain
    [computed, + in flight)          launched: blocks are held, nothing of it can be found
    tokens known + placeholders      how long it will be when all launched steps have finished
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from hybrid_engine.admission import Admission
from hybrid_engine.config import SchedulerConfig
from hybrid_engine.connectors.base import KVConnector
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.drafting import Drafter, Drafting
from hybrid_engine.external_loads import ExternalLoads
from hybrid_engine.holders import Holders
from hybrid_engine.progress import RequestUpdate, SchedulerStats, append_tokens, keep_computed, stop_token
from hybrid_engine.request import Request, RequestStatus
from hybrid_engine.step_builder import StepBuilder
from hybrid_engine.step_plan import RequestId, StepPlan, StepResult
from hybrid_engine.waiting_queue import WaitingQueue

logger = logging.getLogger(__name__)

MAX_TRIED = 16
"""Waiting requests without a place that are tried in one step."""


class Scheduler:
    """Decides step by step what is computed: `schedule` plans a step, `update` takes the oldest one's result in."""

    def __init__(
        self,
        config: SchedulerConfig,
        coordinator: Coordinator,
        *,
        connector: KVConnector | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.config = config
        self.coordinator = coordinator
        self.requests: dict[RequestId, Request] = {}
        self.waiting = WaitingQueue(config)
        self.stats = SchedulerStats()
        self.loads = ExternalLoads(connector, coordinator)
        self.drafting = Drafting(drafter, config)
        self._holders = Holders(config, coordinator)
        self._admission = Admission(config, coordinator, connector)
        self._launched: dict[int, list[Request]] = {}
        self._finished_step = -1
        self._last_copy_step = -1

    # Requests come and go

    @property
    def running(self) -> list[Request]:
        """The requests that steps compute, in the order in which they are served."""
        return self._holders.running

    @property
    def num_running(self) -> int:
        """Requests that steps compute."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, for a connector, or for another step after a preemption."""
        return len(self.requests) - len(self.running)

    @property
    def num_in_flight_steps(self) -> int:
        """Steps that were launched and whose results were not taken in."""
        return len(self._launched)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is running or waiting."""
        return bool(self.requests)

    def holders(self) -> Iterator[Request]:
        """Iterate over all requests that hold blocks."""
        yield from self._holders
        yield from self.loads.requests()

    def add_request(self, request: Request) -> None:
        """Accept a request. Raises PromptTooLongError, having changed nothing, when it can never fit."""
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self.coordinator.check_prompt(request.num_prompt_tokens)
        # The last token needs no place in the cache: nothing is computed after it.
        request.max_total_tokens = min(request.max_total_tokens, self.coordinator.capacity_tokens + 1)
        self.requests[request.request_id] = request
        self.drafting.accept_request(request)
        self.waiting.accept(request, self.stats.num_steps)

    def abort_request(self, request_id: str) -> None:
        """End a request at once and free all it holds; an id that is not known is ignored."""
        self._end_early(request_id, "abort", None)

    def finish_request(self, request_id: str, stop_reason: int | str | None) -> None:
        """End a request whose text met a stop string; an id that is not known is ignored."""
        self._end_early(request_id, "stop", stop_reason)

    def _end_early(self, request_id: str, reason: str, stop_reason: int | str | None) -> None:
        request = self.requests.get(RequestId(request_id))
        if request is None:
            return
        if request.status is RequestStatus.RUNNING:
            self.running.remove(request)
        elif request.held is None:
            self.waiting.remove(request)
        self._end(request, reason, stop_reason)

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        """End a request; what it holds is freed now, or once its launched steps, or its load, have ended."""
        is_loading = request.status is RequestStatus.WAITING_FOR_KV
        if request.status is RequestStatus.RUNNING:
            self._holders.forget_in_runner(request)
        del self.requests[request.request_id]
        request.finish(reason, stop_reason)
        if not is_loading:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        """Free what a request holds that has left RUNNING, unless it has to land first; a victim then waits again."""
        if self._holders.let_go(request) and request.status is RequestStatus.PREEMPTED:
            request.num_tokens_lost = request.num_computed_tokens
            request.num_computed_tokens = 0
            self.waiting.put(request)

    # A step is planned

    def schedule(self) -> StepPlan:
        """Plan the next step. Its request_ids are empty when nothing can run now: it is then not to be launched, but
        what it copies and transfers is to be made, in the order of plans."""
        assert len(self._launched) <= self.config.async_depth, f"{len(self._launched)} steps are launched already"
        self._take_loads()
        builder = StepBuilder(self.config)
        num_preemptions = self.stats.num_preemptions
        urgent = self._admit_urgent(builder)
        is_short = self._schedule_running(builder)
        if urgent is not None:
            self._holders.enter(urgent)
        elif not is_short and self.stats.num_preemptions == num_preemptions and not self._holders.landing:
            self._schedule_waiting(builder)
        plan = self._launch(builder)
        self.loads.start(after_step=self._last_copy_step, finished_step=self._finished_step)
        return self.loads.with_transfers(plan)

    def _launch(self, builder: StepBuilder) -> StepPlan:
        if not builder.requests:
            copies, moves = self.coordinator.memory.take_copies()
            return builder.build(self.stats.num_steps, (), copies=copies, moves=moves)
        # Last, since who was looked at for this step may have asked for a state on the way.
        builder.mark_launched(self.coordinator.recorder)
        copies, moves = self.coordinator.memory.take_copies()
        plan = builder.build(self.stats.num_steps, self._holders.take_ended_ids(), copies=copies, moves=moves)
        self._launched[plan.step_id] = builder.requests
        self.stats.num_steps += 1
        if plan.block_copies:
            self._last_copy_step = plan.step_id
        return plan

    def _schedule_running(self, builder: StepBuilder) -> bool:
        """Let running requests compute; return whether blocks were too few for one of them."""
        drafts = self.drafting.propose(self.running)
        running, index, is_short = self.running, 0, False
        while index < len(running) and builder.num_tokens_left > 0:
            request = running[index]
            index += 1
            num_launched = request.num_computed_tokens + request.num_in_flight_tokens
            num_known = len(request.token_ids) + request.num_placeholders
            # Drafts in flight: below 1 until it is known how many stay.
            num_new = num_known - num_launched
            if num_known >= request.max_total_tokens:
                # The last token of all is never computed.
                num_new -= 1
            if num_new < 1 or (request.num_placeholders and num_known >= request.draft_after):
                continue
            num_behind = len(running) - index
            if num_new > 1 or builder.draft_slots:
                if builder.most_new_tokens < 1:
                    break
                # A chunk leaves a token to each request behind it: no decoding request misses a step for a prompt.
                num_new = min(num_new, max(1, builder.most_new_tokens - num_behind * (1 + builder.draft_slots)))
            guess = drafts.get(request.request_id, ()) if drafts else ()
            # Nor does one for another's drafts, and nobody is preempted for them: without blocks it goes on without.
            guess = guess[: max(0, builder.num_tokens_left - 1 - num_behind)]
            if guess and self._allocate(builder, request, 1, num_lookahead_tokens=len(guess)):
                builder.add(request, num_launched, 1 + len(guess), is_sampled=True, drafts=guess)
                continue
            held = request.held
            if num_launched + num_new > held.num_slots:  # type: ignore[union-attr]
                num_new, has_been_short = self._grow(builder, request, num_new)
                is_short |= has_been_short
                if num_new == 0:
                    continue
            builder.add(request, num_launched, num_new, is_sampled=num_launched + num_new == num_known)
        return is_short

    def _allocate(
        self, builder: StepBuilder, request: Request, num_new_tokens: int, *, num_lookahead_tokens: int = 0
    ) -> bool:
        """Give a running request blocks and tell the runner of them, or return False."""
        held = request.held
        assert held is not None
        num_before = [len(table) for table in held.tables]
        if not self.coordinator.allocate_slots(request, num_new_tokens, num_lookahead_tokens=num_lookahead_tokens):
            return False
        if request in self._holders.unstarted:
            self._holders.unstarted.remove(request)
            builder.started.append(request)
            return True
        new_blocks = [table[n:] for table, n in zip(held.tables, num_before, strict=True)]
        if any(new_blocks):
            builder.new_blocks.append((request, new_blocks))
        return True

    def _grow(self, builder: StepBuilder, request: Request, num_new_tokens: int) -> tuple[int, bool]:
        """Give a running request blocks for its next tokens, preempting later ones where there are none left.

        Returns how many tokens it can compute (0: it waits, or was preempted itself) and whether blocks were short.
        """
        is_short = False
        while not self._allocate(builder, request, num_new_tokens):
            if self._holders.give_up_pins():
                continue
            is_short = True
            if self._holders.landing:
                # Their blocks come back without anybody's loss.
                return 0, True
            if self.running[-1] is not request:
                self._preempt(self.running[-1], "blocks")
            elif len(self.running) > 1 or builder.requests:
                self._preempt(request, "blocks")
                return 0, True
            elif num_new_tokens > 1 and not request.num_in_flight_tokens:
                # Alone, it is never preempted for its own growth: a smaller chunk needs fewer window blocks.
                num_new_tokens = (num_new_tokens + 1) // 2
            else:
                can_hope = request.num_in_flight_tokens or self._holders.is_held_by_others(request)
                assert can_hope, f"{request} runs alone and can't compute one token"
                return 0, True
        return num_new_tokens, is_short

    # Preemption

    def _preempt(self, victim: Request, reason: str = "asked") -> None:
        """Let a running request wait again. Steps launched for it are not lost: it holds its blocks until they land."""
        logger.info(
            "preempted request=%s reason=%s computed_tokens=%d in_flight_tokens=%d num_preemptions=%d num_running=%d",
            *(victim.request_id, reason, victim.num_computed_tokens, victim.num_in_flight_tokens),
            *(victim.num_preemptions + 1, len(self.running)),
        )
        self.running.remove(victim)
        self._holders.forget_in_runner(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        self.stats.preemptions[reason] += 1
        self._let_go(victim)

    # Waiting requests

    def _take_loads(self) -> None:
        if not self.loads:
            return
        arrived, failed = self.loads.take_arrived()
        for request in arrived:
            self._count_recomputed(request)
            self._holders.unstarted.add(request)
            self._holders.enter(request)
        for request in failed:
            self.waiting.put(request)

    @property
    def _is_full(self) -> bool:
        return len(self.running) + len(self.loads) >= self.config.max_num_seqs

    def _admit_urgent(self, builder: StepBuilder) -> Request | None:
        """Admit the first waiting request if it can take the place of less important ones; it alone, in this step."""
        if self.config.policy != "priority" or not self.waiting or not self.running or self._holders.landing:
            return None
        request = self.waiting[0]
        if not (self._is_full or request.shortage is not None) or not self._yields_to(request):
            return None
        if self._is_full:
            self._preempt(self.running[-1], "priority")
        while not self._try_to_admit(builder, request):
            if self._holders.landing or not self.running or not self._yields_to(request):
                return None
            self._preempt(self.running[-1], "priority")
        return request if request.status is RequestStatus.RUNNING else None

    def _yields_to(self, request: Request) -> bool:
        """Return whether the last running request is strictly less important, ageing counted or not."""
        victim = self.running[-1]
        return request.priority < victim.priority and request.rank < victim.rank

    def _schedule_waiting(self, builder: StepBuilder) -> None:
        waiting, config = self.waiting, self.config
        without_place: list[Request] = []
        num_passed, num_siblings = 0, 0
        # Looking for siblings is bounded too: thousands may wait for one document.
        while len(without_place) + num_siblings < len(waiting) and not self._is_full:
            if num_siblings >= config.max_num_seqs:
                break
            request = waiting[len(without_place) + num_siblings]
            if without_place and request.priority > without_place[0].priority and config.policy == "priority":
                # It would have to give way to who has no place yet.
                break
            # Also when nothing is left to spend: who computes its prefix must learn in time where they part.
            if self._admission.waits_for_a_junction(request, self.running, self.loads):
                num_siblings += 1
                continue
            if builder.most_new_tokens < 1:
                break
            if self._try_to_admit(builder, request):
                if request.status is RequestStatus.RUNNING:
                    self._holders.enter(request)
                num_passed = len(without_place)
                continue
            without_place.append(request)
            if request.num_overtaken >= config.max_overtaken_steps or len(without_place) >= MAX_TRIED:
                break
        for request in without_place[:num_passed]:
            request.num_overtaken += 1
        self.stats.num_overtaken += num_passed

    def _try_to_admit(self, builder: StepBuilder, request: Request) -> bool:
        """Give a waiting request its place: in this step, or, when a connector brings a part of it, in a later one.

        One that runs is the caller's to enter into RUNNING.
        """
        is_alone = not self.running and not builder.requests and not self.loads and self.coordinator.is_idle()
        place = self._admission.find_place(request, builder.most_new_tokens, self.running, is_alone=is_alone)
        if place is None:
            assert not is_alone, f"{request} was accepted but doesn't fit alone"
            return False
        self.waiting.remove(request)
        request.num_overtaken = 0
        if place.num_external_tokens:
            request.status = RequestStatus.WAITING_FOR_KV
            self.loads.add(request, request.num_computed_tokens, place.num_external_tokens)
            return True
        self._count_recomputed(request)
        request.status = RequestStatus.RUNNING
        builder.started.append(request)
        num_launched, num_new = request.num_computed_tokens, place.num_new_tokens
        builder.add(request, num_launched, num_new, is_sampled=num_launched + num_new == request.num_tokens)
        return True

    def _count_recomputed(self, request: Request) -> None:
        """Count what a request that is about to run has computed before and finds no more."""
        lost, request.num_tokens_lost = request.num_tokens_lost, 0
        self.stats.num_recomputed_tokens += max(0, lost - request.num_computed_tokens)

    # A step has run

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what a step computed: positions advance, blocks become findable, answers grow or end.

        Results come in the order in which the steps were launched.
        """
        updates: list[RequestUpdate] = []
        launched = self._launched.pop(plan.step_id, None)
        if launched is None:
            assert not plan.request_ids, f"step {plan.step_id} was not launched"
            return updates
        assert not self._launched or plan.step_id < min(self._launched), f"step {plan.step_id} is not the oldest"
        self._finished_step = plan.step_id
        self.stats.num_computed_tokens += plan.num_tokens
        self.coordinator.note_step(plan.num_computed_tokens, plan.num_scheduled_tokens, result.seconds)
        counts: Sequence[int] = plan.num_scheduled_tokens
        if plan.draft_token_ids:
            counts = self.drafting.take_in(plan, result, launched)
        has_ended, sampled, finished = False, result.sampled, result.finished
        for request, num_new in zip(launched, counts, strict=True):
            request.num_in_flight_tokens -= num_new
            request.num_computed_tokens += num_new
            status, reason = request.status, None
            token_ids = sampled.get(request.request_id)
            if token_ids and status is not RequestStatus.FINISHED:
                token_ids, reason = append_tokens(
                    request, token_ids, finished.get(request.request_id) if finished else None
                )
                updates.append(RequestUpdate(request, token_ids, reason))
            keep_computed(self.coordinator, request)
            if reason is not None:
                has_ended = True
                self._end(request, reason, stop_token(request, reason))
            if status is not RequestStatus.RUNNING and request in self._holders.landing:
                self._let_go(request)
        if has_ended:
            self.running[:] = [request for request in self.running if request.status is RequestStatus.RUNNING]
        self.loads.start(after_step=self._last_copy_step, finished_step=self._finished_step)
        return updates
