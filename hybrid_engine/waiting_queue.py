"""The requests that wait, in the order in which they are to be admitted."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.request import Request

BY_RANK = attrgetter("rank")


class WaitingQueue:
    """Sorted by rank, which a request keeps for life: one that was preempted stands before all who came later.

    First come, first served: the rank is the order of arrival. By priority: the priority, then the arrival. Each step
    of waiting counts as 1 / ageing_steps of a priority. All who wait age alike, so that this never changes the order
    of two of them: the step of arrival is in the rank, and a request can be passed only by those who arrive within
    ageing_steps steps for each unit that their priority is better by.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config
        self._requests: list[Request] = []
        self._num_accepted = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def __getitem__(self, index: int) -> Request:
        return self._requests[index]

    def accept(self, request: Request, step: int) -> None:
        """Give a new request its rank and its place."""
        self._num_accepted += 1
        request.rank = (0, 0, self._num_accepted)
        if self._config.policy == "priority":
            age = self._config.ageing_steps
            urgency = request.priority + step / age if age else request.priority
            request.rank = (urgency, request.arrival_time, self._num_accepted)
        self.put(request)

    def put(self, request: Request) -> None:
        """Let a request wait that has its rank."""
        insort(self._requests, request, key=BY_RANK)

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it stands."""
        index = bisect_left(self._requests, request.rank, key=BY_RANK)
        assert self._requests[index] is request, f"{request} does not wait"
        del self._requests[index]
