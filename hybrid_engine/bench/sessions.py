"""When which call of a workload is submitted: sessions take turns for places, calls wait for what they follow."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hybrid_engine.bench.workload import WorkItem


@dataclass
class _Session:
    """One session while it goes on."""

    name: str
    root: str
    items: deque[WorkItem]
    started_s: float = 0.0
    first_arrival_s: float | None = None
    num_ended: int = 0
    children: dict[int, list[_Session]] = field(default_factory=dict)
    """Sub-agents, by the call that sends them."""
    is_over: bool = False


class Sessions:
    """Hands out calls in time order; at most so many sessions, their sub-agents not counted, go on at once."""

    def __init__(self, items: Sequence[WorkItem], *, concurrency: int, keeps_pace: bool) -> None:
        """keeps_pace: arrivals and think times are honoured; otherwise a call is due when what it follows has ended."""
        self._keeps_pace = keeps_pace
        self._concurrency = concurrency
        self._sessions = _by_name(items)
        self._roots = deque(each for each in self._sessions.values() if each.root == each.name)
        self._num_alive: dict[str, int] = {}
        """Sessions of a root that go on, itself counted."""
        self._due: list[tuple[float, int, _Session]] = []
        self._blocked: list[_Session] = []
        self._num_due = 0
        self._start_roots(0.0)

    @property
    def next_time(self) -> float | None:
        """When the next call is due; None: none is, before another one ends."""
        return self._due[0][0] if self._due else None

    def take_due(self, now: float) -> Iterator[tuple[WorkItem, WorkItem | None]]:
        """Iterate over the calls that are due, each with the one that follows it in its session."""
        while self._due and self._due[0][0] <= now:
            _, _, session = heapq.heappop(self._due)
            item = session.items.popleft()
            yield item, session.items[0] if session.items else None

    def end(self, name: str, now: float) -> None:
        """Note that a session's call has ended; what follows it becomes due in its time."""
        session = self._sessions[name]
        turn = session.num_ended
        session.num_ended += 1
        for child in session.children.pop(turn, ()):
            self._num_alive[session.root] += 1
            self._start(child, now)
        if session.items:
            self._plan_next(session, now)
        else:
            self._finish(session, now)

    def _finish(self, session: _Session, now: float) -> None:
        session.is_over = True
        for children in session.children.values():
            # Sent by a call that the session doesn't have: now or never.
            for child in children:
                self._num_alive[session.root] += 1
                self._start(child, now)
        session.children.clear()
        blocked, self._blocked = self._blocked, []
        for each in blocked:
            self._plan_next(each, now)
        self._num_alive[session.root] -= 1
        if not self._num_alive[session.root]:
            del self._num_alive[session.root]
            self._start_roots(now)

    def _start_roots(self, now: float) -> None:
        while self._roots and len(self._num_alive) < self._concurrency:
            session = self._roots.popleft()
            self._num_alive[session.root] = 1
            self._start(session, now)

    def _start(self, session: _Session, now: float) -> None:
        first = session.items[0]
        session.first_arrival_s = first.arrival_s
        think = first.think_s or 0.0
        arrival = first.arrival_s or 0.0
        # Who waited for a place starts when there is one.
        due = now + think if first.parent else max(now, arrival)
        session.started_s = due if self._keeps_pace else now
        self._push(session, session.started_s)

    def _plan_next(self, session: _Session, now: float) -> None:
        item = session.items[0]
        if any(name in self._sessions and not self._sessions[name].is_over for name in item.waits_for):
            self._blocked.append(session)
            return
        due = now
        if self._keeps_pace and item.think_s is not None:
            due = now + item.think_s
        elif self._keeps_pace and item.arrival_s is not None and session.first_arrival_s is not None:
            due = max(now, session.started_s + item.arrival_s - session.first_arrival_s)
        self._push(session, due)

    def _push(self, session: _Session, due: float) -> None:
        self._num_due += 1
        heapq.heappush(self._due, (due, self._num_due, session))


def _by_name(items: Sequence[WorkItem]) -> dict[str, _Session]:
    """Group calls by their session, and tell parents of their sub-agents; one whose parent isn't there is a root."""
    sessions: dict[str, _Session] = {}
    for item in items:
        if item.session not in sessions:
            sessions[item.session] = _Session(item.session, item.session, deque())
        sessions[item.session].items.append(item)
    for session in sessions.values():
        first = session.items[0]
        parent = sessions.get(first.parent) if first.parent else None
        if parent is not None and parent is not session:
            session.root = parent.root
            parent.children.setdefault(first.parent_turn, []).append(session)
    return sessions
