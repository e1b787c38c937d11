"""What runs in the next step: running requests first, then waiting ones with what the budget leaves.

No torch here: the scheduler sees tokens and blocks, and hands out a StepPlan.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import PromptTooLongError
from hybrid_engine.groups.base import NEVER
from hybrid_engine.groups.block import Block
from hybrid_engine.prefix_lookup import CacheHit
from hybrid_engine.request import Request, RequestStatus
from hybrid_engine.step_builder import StepBuilder, block_ids, start
from hybrid_engine.step_plan import NewBlocks, RequestId, StepPlan, StepResult

logger = logging.getLogger(__name__)


class RequestUpdate(NamedTuple):
    """What a step brought to one request."""

    request: Request
    new_token_ids: tuple[int, ...]
    finish_reason: str | None


@dataclass
class SchedulerStats:
    """Counters since the scheduler was made."""

    num_steps: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed a second time because a request was preempted."""


class Scheduler:
    """Decides step by step what is computed; `schedule` and `update` take turns."""

    def __init__(self, config: SchedulerConfig, coordinator: Coordinator) -> None:
        self.config = config
        self.coordinator = coordinator
        self.requests: dict[RequestId, Request] = {}
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.stats = SchedulerStats()
        self._ended_ids: list[RequestId] = []
        self._launched: dict[int, list[Request]] = {}

    # Requests come and go

    @property
    def num_running(self) -> int:
        """Requests that hold blocks."""
        return len(self.running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their first step, or for another one after a preemption."""
        return len(self.waiting)

    def has_unfinished_requests(self) -> bool:
        """Return whether any request is running or waiting."""
        return bool(self.requests)

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise PromptTooLongError when a prompt can't fit even alone."""
        capacity = self.coordinator.capacity_tokens
        if num_prompt_tokens > capacity:
            group = self.coordinator.limiting_group()
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens:,} tokens, the cache memory holds {capacity:,} of one request "
                f"(group {group.group_id}, {group.spec.kind}, blocks of {group.block_size} tokens): shorten the "
                f"prompt or give the cache more memory"
            )

    def add_request(self, request: Request) -> None:
        """Accept a request. Raises PromptTooLongError, having changed nothing, when it can never fit."""
        assert request.request_id not in self.requests, f"request id {request.request_id} is in use"
        self.check_prompt(request.num_prompt_tokens)
        # The last token needs no place in the cache: nothing is computed after it.
        request.max_total_tokens = min(request.max_total_tokens, self.coordinator.capacity_tokens + 1)
        self.requests[request.request_id] = request
        self.waiting.append(request)

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
        else:
            self.waiting.remove(request)
        self._end(request, reason, stop_reason)

    def _end(self, request: Request, reason: str, stop_reason: int | str | None) -> None:
        self.coordinator.free(request)
        if request.status is RequestStatus.RUNNING:
            self._ended_ids.append(request.request_id)
        del self.requests[request.request_id]
        request.finish(reason, stop_reason)

    # A step is planned

    def schedule(self) -> StepPlan:
        """Plan the next step; its request_ids are empty when nothing can run."""
        builder = StepBuilder()
        budget, has_preempted = self._schedule_running(builder, self.config.max_num_scheduled_tokens)
        if not has_preempted:
            self._schedule_waiting(builder, budget)
        for request, num_new in zip(builder.requests, builder.num_scheduled, strict=True):
            # The step in flight writes the states: until it has ended nobody may keep them.
            request.held.state_position = -1  # type: ignore[union-attr]
            # Last, since who was looked at for this step may have asked for a state on the way.
            if request.checkpoint_positions:
                builder.state_captures += self.coordinator.recorder.plan_captures(request, num_new)
        ended_ids, self._ended_ids = self._ended_ids, []
        plan = builder.build(self.stats.num_steps, ended_ids)
        self._launched[plan.step_id] = builder.requests
        self.stats.num_steps += 1
        return plan

    def _schedule_running(self, builder: StepBuilder, budget: int) -> tuple[int, bool]:
        has_preempted = False
        most_tokens = self.config.long_prefill_token_threshold or NEVER
        running, index = self.running, 0
        while index < len(running) and budget > 0:
            request = running[index]
            num_computed = request.num_computed_tokens
            num_new = min(len(request.token_ids) - num_computed, budget, most_tokens)
            held = request.held
            assert held is not None, f"{request} runs without blocks"
            if num_computed + num_new > held.num_slots:
                num_new, preempted = self._grow(builder, request, num_new)
                has_preempted |= preempted
                if num_new == 0:
                    break
            builder.add(request, num_new)
            budget -= num_new
            index += 1
        return budget, has_preempted

    def _grow(self, builder: StepBuilder, request: Request, num_new_tokens: int) -> tuple[int, bool]:
        """Give a running request blocks for its next tokens, preempting later ones where there are none left.

        Returns how many tokens it can compute (0: it was preempted itself) and whether anything was preempted.
        """
        held = request.held
        assert held is not None
        num_blocks_before = [len(table) for table in held.tables]
        has_preempted = False
        while not self.coordinator.allocate_slots(request, num_new_tokens):
            if self._give_up_pins():
                continue
            if self.running[-1] is not request:
                self._preempt(self.running[-1])
                has_preempted = True
            elif len(self.running) > 1:
                self._preempt(request)
                return 0, True
            else:
                # Alone, it is never preempted for its own growth: a smaller chunk needs fewer window blocks.
                assert num_new_tokens > 1, f"{request} runs alone and can't compute one token"
                num_new_tokens = (num_new_tokens + 1) // 2
        new_ids = [block_ids(table[n:]) for table, n in zip(held.tables, num_blocks_before, strict=True)]
        if any(new_ids):
            builder.new_blocks.append(NewBlocks(request.request_id, tuple(new_ids)))
        return num_new_tokens, has_preempted

    def _give_up_pins(self) -> bool:
        """Let go of what running requests hold for others' sake alone; return whether that was anything."""
        pinned = [request.held for request in self.running if request.held is not None and request.held.pinned]
        for held in pinned:
            self.coordinator.recorder.unpin_checkpoints(held)
        return bool(pinned)

    def _preempt(self, victim: Request) -> None:
        self.running.remove(victim)
        self.coordinator.free(victim)
        logger.info(
            "preempted request %s at %d computed tokens: no free blocks", victim.request_id, victim.num_computed_tokens
        )
        victim.status = RequestStatus.PREEMPTED
        victim.num_preemptions += 1
        victim.num_tokens_lost = victim.num_computed_tokens
        victim.num_computed_tokens = 0
        self.stats.num_preemptions += 1
        self._ended_ids.append(victim.request_id)
        self.waiting.appendleft(victim)

    def _schedule_waiting(self, builder: StepBuilder, budget: int) -> None:
        siblings: list[Request] = []
        # Looking for siblings is bounded too: thousands may wait for one document.
        while self.waiting and max(len(self.running), len(siblings)) < self.config.max_num_seqs:
            request = self.waiting[0]
            # Also when nothing is left to spend: who computes its prefix must learn in time where they part.
            if self._waits_for_a_junction(request):
                siblings.append(self.waiting.popleft())
                continue
            if budget <= 0:
                break
            num_new = self._admit(builder, request, budget)
            if num_new == 0:
                assert self.running, f"{request} was accepted but doesn't fit alone"
                break
            self.waiting.popleft()
            request.status = RequestStatus.RUNNING
            self.running.append(request)
            builder.started.append(start(request))
            builder.add(request, num_new)
            budget -= num_new
        self.waiting.extendleft(reversed(siblings))

    def _waits_for_a_junction(self, request: Request) -> bool:
        """Return whether another request is just computing more of this one's prefix than is cached.

        The other one leaves a checkpoint where the two part; this one waits for it, and nobody waits for this one.
        """
        coordinator = self.coordinator
        if not coordinator.may_read(request):
            return False
        if request.junction is not None:
            awaited, position = request.junction
            if awaited.status is RequestStatus.RUNNING and awaited.num_computed_tokens < position:
                return True
            request.junction = None
        best, leader = 0, None
        for other in self.running:
            if other.num_computed_tokens < other.num_prompt_tokens:
                junction = coordinator.lookup.shared_tokens(request, other)
                if junction > max(best, other.num_computed_tokens):
                    best, leader = junction, other
        if leader is None or best < coordinator.alignment_tokens:
            return False
        hit = coordinator.lookup.find_longest_cache_hit(request)
        if best < hit.num_computed_tokens + coordinator.alignment_tokens:
            return False
        coordinator.recorder.lay_checkpoint(leader, best)
        request.junction = leader, best
        return True

    def _admit(self, builder: StepBuilder, request: Request, budget: int) -> int:
        """Find a waiting request's hit and give it blocks; return how many tokens it computes now, 0: no place."""
        coordinator = self.coordinator
        hit, blocks = coordinator.look_up(request)
        explanation = request.cache or coordinator.explain(request, hit)
        num_found = hit.num_computed_tokens
        num_new = self._allocate_first(request, hit, blocks, budget)
        while num_new == 0 and not self.running and hit.num_computed_tokens > 0:
            # Hit, copy and new blocks together exceed the memory: a shorter hit may not.
            hit, blocks = coordinator.lookup.collect_hit(request, max_tokens=hit.num_computed_tokens - 1)
            num_new = self._allocate_first(request, hit, blocks, budget)
        if num_new == 0:
            return 0
        request.num_computed_tokens = hit.num_computed_tokens
        num_lost = num_found - hit.num_computed_tokens
        if num_lost:
            explanation = replace(
                explanation, hit=explanation.hit - num_lost, alignment=explanation.alignment + num_lost
            )
        request.cache = explanation
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        self.stats.num_recomputed_tokens += max(0, request.num_tokens_lost - hit.num_computed_tokens)
        request.checkpoint_positions = coordinator.recorder.checkpoint_positions(request, hit)
        builder.block_copies.extend(coordinator.recorder.copies(request, hit))
        return num_new

    def _allocate_first(self, request: Request, hit: CacheHit, blocks: Sequence[Sequence[Block]], budget: int) -> int:
        """Give a waiting request the blocks of its first chunk; return the chunk's tokens, 0: no place."""
        is_alone = not self.running
        if hit.checkpoint is not None:
            # Before blocks are taken, so that it isn't the one to make room for whoever goes on from it.
            self.coordinator.checkpoints.touch(hit.checkpoint)
        most_tokens = self.config.long_prefill_token_threshold or NEVER
        num_new = min(request.num_tokens - hit.num_computed_tokens, budget, most_tokens)
        while num_new > 0:
            if self.coordinator.allocate_slots(
                request,
                num_new,
                num_new_computed_tokens=hit.num_computed_tokens,
                new_computed_blocks=blocks,
                partial_blocks=hit.checkpoint.blocks if hit.checkpoint else (),
                # Alone it takes what there is: its known tokens fit, or it would have been refused.
                full_sequence_must_fit=self.config.full_sequence_must_fit and not is_alone,
                chunk_tokens=min(self.config.max_num_scheduled_tokens, most_tokens),
                watermark=0.0 if is_alone else self.config.watermark,
            ):
                return num_new
            # Alone, a smaller chunk is tried: it needs fewer window blocks.
            num_new = num_new // 2 if is_alone else 0
        return 0

    # A step has run

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestUpdate]:
        """Take in what a step computed: positions advance, blocks become findable, answers grow or end."""
        updates: list[RequestUpdate] = []
        has_ended = False
        self.stats.num_computed_tokens += plan.num_tokens
        for request, num_new in zip(self._launched.pop(plan.step_id), plan.num_scheduled_tokens, strict=True):
            if request.status is not RequestStatus.RUNNING:
                continue
            num_computed = request.num_computed_tokens + num_new
            request.num_computed_tokens = num_computed
            held = request.held
            if num_computed >= held.register_position:  # type: ignore[union-attr]
                self.coordinator.cache_blocks(request, num_computed)
            held.state_position = num_computed  # type: ignore[union-attr]
            if held.captures:  # type: ignore[union-attr]
                self.coordinator.recorder.keep_captures(request)
            elif num_computed == request.num_prompt_tokens:
                self.coordinator.recorder.record_prompt_end(request)
            token_ids = result.sampled.get(request.request_id, ())
            if not token_ids:
                continue
            (token_id,) = token_ids
            request.append_token(token_id)
            reason = _finish_reason(request, token_id, result.finished.get(request.request_id))
            if reason is not None:
                has_ended = True
                is_stop_token = reason == "stop" and token_id in request.stop_token_ids - request.eos_token_ids
                self._end(request, reason, token_id if is_stop_token else None)
            updates.append(RequestUpdate(request, token_ids, reason))
        if has_ended:
            self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]
        return updates


def _finish_reason(request: Request, token_id: int, runners_reason: str | None) -> str | None:
    """Return why the answer ends with this token, if it does; runners_reason: that its grammar allows no other."""
    num_tokens = len(request.token_ids)
    if token_id in request.stop_token_ids and num_tokens >= request.min_total_tokens:
        return "stop"
    return runners_reason or ("length" if num_tokens >= request.max_total_tokens else None)
