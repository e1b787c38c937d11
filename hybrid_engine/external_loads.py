"""Loads of cache entries from elsewhere: which are running, for whom, and what becomes of their blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

from hybrid_engine.connectors.base import KVConnector, KVLoad
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.request import Request, RequestStatus
from hybrid_engine.step_plan import StepPlan

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Waiting:
    load: KVLoad
    step_id: int
    """The launched step that must have finished before."""


class ExternalLoads:
    """The loads that have been decided on and have not ended."""

    def __init__(self, connector: KVConnector | None, coordinator: Coordinator) -> None:
        self.connector = connector
        self._coordinator = coordinator
        self._running: dict[int, KVLoad] = {}
        self._waiting: list[_Waiting] = []
        self._num_loads = 0
        self.num_loaded_tokens = 0
        self.num_failed = 0

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[KVLoad]:
        return iter(self._running.values())

    def requests(self) -> list[Request]:
        """Return those that hold blocks which are being filled, also such as were aborted meanwhile."""
        return [load.request for load in self._running.values()]

    def add(self, request: Request, num_local_tokens: int, num_external_tokens: int) -> None:
        """Take note of a load into blocks that the request holds; `start` begins it."""
        held = request.held
        assert held is not None
        block_ids = tuple([tuple([block.block_id for block in table]) for table in held.tables])
        for manager, table in zip(self._coordinator.managers, held.tables, strict=True):
            # A load knows them by their ids.
            manager.pool.fix(table)
        load = KVLoad(self._num_loads, request, num_local_tokens, num_external_tokens, block_ids)
        self._num_loads += 1
        self._running[load.load_id] = load
        self._waiting.append(_Waiting(load, -1))

    def start(self, *, after_step: int, finished_step: int) -> None:
        """Begin what may begin.

        after_step: the last launched step that copies blocks. A block is let go when its copy is planned, so that it
        may already belong to a new load: that must not write before the copy has been made.
        """
        if not self._waiting:
            return
        assert self.connector is not None
        waiting = [each if each.step_id >= 0 else _Waiting(each.load, after_step) for each in self._waiting]
        self._waiting = [each for each in waiting if each.step_id > finished_step]
        for each in waiting:
            if each.step_id <= finished_step:
                self.connector.start_load(each.load)

    def with_transfers(self, plan: StepPlan) -> StepPlan:
        """Let a plan take along what the connector wants moved before anything is written."""
        moved = self.connector.take_transfers() if self.connector is not None else None
        return replace(plan, transfers=moved) if moved else plan

    def take_arrived(self) -> tuple[list[Request], list[Request]]:
        """Settle the loads that have ended; return who can run now, and who must compute instead and holds nothing."""
        arrived: list[Request] = []
        failed: list[Request] = []
        if self.connector is None or not self._running:
            return arrived, failed
        for result in self.connector.take_finished():
            load = self._running.pop(result.load_id)
            request = load.request
            assert request.held is not None
            for manager, table in zip(self._coordinator.managers, request.held.tables, strict=True):
                manager.pool.unfix(table)
            if result.is_loaded:
                self._register(load)
            else:
                self.num_failed += 1
                request.num_computed_tokens = 0
            if result.is_loaded and request.status is not RequestStatus.FINISHED:
                arrived.append(request)
                continue
            self._coordinator.free(request)
            if request.status is not RequestStatus.FINISHED:
                self._send_back(request)
                failed.append(request)
        return arrived, failed

    def _send_back(self, request: Request) -> None:
        logger.warning("load failed request=%s: its tokens are computed instead", request.request_id)
        request.skips_connector = True
        request.status = RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING
        if not request.num_preemptions:
            # It said what the connector would bring.
            request.cache = None

    def _register(self, load: KVLoad) -> None:
        request, held = load.request, load.request.held
        assert held is not None
        request.num_computed_tokens = held.state_position = load.end_tokens
        self._coordinator.cache_blocks(request, load.end_tokens)
        self._coordinator.recorder.keep_loaded(request)
        self.num_loaded_tokens += load.num_external_tokens
        # The tables have place for more, but nobody has told a runner of them yet: what comes next must go there.
        held.num_slots = 0
