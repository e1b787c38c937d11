"""Who holds blocks: requests that run, and those that have left while launched steps still compute them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.request import Request, RequestStatus
from hybrid_engine.step_plan import RequestId
from hybrid_engine.waiting_queue import BY_RANK


class Holders:
    """The running requests in the order in which steps serve them; the last one is the first to be preempted.

    A request that leaves RUNNING while launched steps compute it is *landing*: these steps go on writing its blocks,
    so that it holds them until the last of them has finished.
    """

    def __init__(self, config: SchedulerConfig, coordinator: Coordinator) -> None:
        self._is_by_rank = config.policy == "priority"
        self._coordinator = coordinator
        self.running: list[Request] = []
        self.landing: set[Request] = set()
        self.unstarted: set[Request] = set()
        """Running requests that no runner was told of: a connector has just filled their blocks."""
        self._ended_ids: list[RequestId] = []

    def __iter__(self) -> Iterator[Request]:
        yield from self.running
        yield from self.landing

    def enter(self, request: Request) -> None:
        """Let a request run."""
        request.status = RequestStatus.RUNNING
        if self._is_by_rank:
            insort(self.running, request, key=BY_RANK)
        else:
            self.running.append(request)

    def forget_in_runner(self, request: Request) -> None:
        """Let the next plan say that a request which ran is over, if a runner knows of it."""
        if request in self.unstarted:
            self.unstarted.remove(request)
        else:
            self._ended_ids.append(request.request_id)

    def take_ended_ids(self) -> list[RequestId]:
        """Return what the next plan is to say is over."""
        ended_ids, self._ended_ids = self._ended_ids, []
        return ended_ids

    def let_go(self, request: Request) -> bool:
        """Free what a request holds that has left RUNNING; return False when it has to land first."""
        if request.num_in_flight_tokens:
            self.landing.add(request)
            return False
        self.landing.discard(request)
        # A launched step, or drafts, may have gone past the token that ended the answer.
        request.num_computed_tokens = min(request.num_computed_tokens, request.num_tokens)
        self._coordinator.free(request)
        return True

    def give_up_pins(self) -> bool:
        """Let go of what requests hold for others' sake alone; return whether that was anything."""
        pinned = [request.held for request in self if request.held is not None and request.held.pinned]
        for held in pinned:
            self._coordinator.recorder.unpin_checkpoints(held)
        return bool(pinned)

    def is_held_by_others(self, request: Request) -> bool:
        """Return whether blocks are held by anybody but one request."""
        assert request.held is not None
        tables = zip(self._coordinator.managers, request.held.tables, strict=True)
        return any(
            manager.pool.num_held > sum(block is not manager.pool.null_block for block in table)
            for manager, table in tables
        )
