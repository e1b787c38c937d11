"""How many drafts a request gets: as many as pay, by how its last ones fared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from hybrid_engine.drafting import Drafter
from hybrid_engine.request import Request

WEIGHT = 0.15
"""What the newest draft counts in the estimate of the acceptance rate."""
FIRST_RATE = 0.7
"""Taken for the rate before anything was seen, so that drafting is tried."""
RETRY_TOKENS = 24
"""Where drafting doesn't pay it is tried again, with one draft, after so many tokens of the answer."""


@dataclass(slots=True)
class _Record:
    """What is known of a request's drafts."""

    rate: float
    """Chance that a draft is accepted if those before it were."""
    next_try: int = 0
    """While drafting doesn't pay: tokens of the request at which it is tried again."""


class AdaptiveDrafter:
    """Asks another drafter for as many drafts as pay.

    With a chance of a for each draft, d of them bring 1 + a + a^2 + … + a^d tokens a step, and the step takes 1 + d *
    cost as long as one without: the d with the most tokens a time is asked for, be it 0.
    """

    def __init__(self, drafter: Drafter, *, cost: float) -> None:
        """cost: what one draft adds to a step, making it included, as a share of a step without drafts."""
        self.drafter = drafter
        self.cost = cost
        self._records: WeakKeyDictionary[Request, _Record] = WeakKeyDictionary()
        # What a new request starts from: requests of one workload fare alike.
        self._shared_rate = FIRST_RATE

    def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> Sequence[tuple[int, ...]]:
        """Return for each request as many drafts as pay, at most so many."""
        counts = [
            self._num_drafts(request, most) if most else 0 for request, most in zip(requests, max_drafts, strict=True)
        ]
        return self.drafter.propose(requests, counts)

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        """Learn how many of the drafts that a step ran were accepted."""
        record = self._record(request)
        for _ in range(num_accepted):
            record.rate += WEIGHT * (1 - record.rate)
        if num_accepted < num_drafts:
            record.rate -= WEIGHT * record.rate
        record.next_try = request.num_tokens + RETRY_TOKENS
        self._shared_rate += 0.1 * (record.rate - self._shared_rate)
        self.drafter.observe(request, num_drafts, num_accepted)

    def _num_drafts(self, request: Request, most: int) -> int:
        record = self._record(request)
        count = best_num_drafts(record.rate, self.cost, most)
        return 1 if count == 0 and request.num_tokens >= record.next_try else count

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            # A new request may differ from the others: it tries at least once.
            record = self._records[request] = _Record(max(self._shared_rate, FIRST_RATE / 2))
        return record


def best_num_drafts(rate: float, cost: float, most: int) -> int:
    """Return the number of drafts, at most so many, that bring the most tokens a time."""
    best, best_speed = 0, 1.0
    tokens, chance = 1.0, 1.0
    for count in range(1, most + 1):
        chance *= rate
        tokens += chance
        speed = tokens / (1 + count * cost)
        if speed > best_speed:
            best, best_speed = count, speed
    return best
