"""A drafter and a connector for tests of the scheduler: right, wrong, late and failing as a random generator says."""

import random
from collections.abc import Sequence

from bookkeeping import FakeDevice, NamedPrefixes

from hybrid_engine.connectors.base import KVLoad, KVLoadResult
from hybrid_engine.request import Request
from hybrid_engine.step_plan import NULL_BLOCK_ID

VOCAB_SIZE = 50


class FakeDrafter:
    """Guesses what FakeDevice would say; each token is right with a given probability, and so is each guess there."""

    def __init__(self, *, right: float = 1.0, guesses: float = 1.0, rng: random.Random | None = None) -> None:
        self.right = right
        self.guesses = guesses
        self.rng = rng or random.Random(0)
        self.observed: list[tuple[int, int]] = []

    def propose(self, requests: Sequence[Request], max_drafts: Sequence[int]) -> list[tuple[int, ...]]:
        return [self._guess(request, most) for request, most in zip(requests, max_drafts, strict=True)]

    def observe(self, request: Request, num_drafts: int, num_accepted: int) -> None:
        self.observed.append((num_drafts, num_accepted))

    def _guess(self, request: Request, most: int) -> tuple[int, ...]:
        assert request.num_computed_tokens == request.num_tokens - 1
        if self.rng.random() >= self.guesses:
            return ()
        tokens, guess = NamedPrefixes(request.token_ids), []
        for _ in range(most):
            token_id = tokens.next_token(VOCAB_SIZE)
            if self.rng.random() >= self.right:
                token_id = (token_id + 1) % VOCAB_SIZE
            guess.append(token_id)
            tokens.append(token_id)
        return tuple(guess)


class FakeConnector:
    """Has every prompt, up to a number of tokens, and writes it into the device's blocks after some steps.

    A load that fails has written something else before.
    """

    device: FakeDevice

    def __init__(
        self, num_tokens: int = 1 << 30, *, delay_steps: int = 0, fails: float = 0.0, rng: random.Random | None = None
    ) -> None:
        """rng: when given, lengths and delays are drawn up to these."""
        self.num_tokens = num_tokens
        self.delay_steps = delay_steps
        self.fails = fails
        self.rng = rng
        self.loads: list[KVLoad] = []
        self._running: list[tuple[int, KVLoad]] = []

    def find(self, request: Request, num_local_tokens: int) -> int:
        most = min(self.num_tokens, request.num_tokens - 1) - num_local_tokens
        if self.rng is not None:
            # The same answer each time it is asked, as a real one gives while nothing changes.
            most = random.Random(f"{request.request_id}{self.num_tokens}").randint(-10, max(most, 0))
        return max(0, min(most, request.num_tokens - 1 - num_local_tokens))

    def start_load(self, load: KVLoad) -> None:
        self.loads.append(load)
        delay = self.rng.randint(0, self.delay_steps) if self.rng is not None else self.delay_steps
        self._running.append((delay, load))

    def advance(self) -> None:
        """Let one step's time pass."""
        self._running = [(delay - 1, load) for delay, load in self._running]

    def take_finished(self) -> list[KVLoadResult]:
        due = [load for delay, load in self._running if delay < 0]
        self._running = [(delay, load) for delay, load in self._running if delay >= 0]
        return [KVLoadResult(load.load_id, self._write(load)) for load in due]

    def _write(self, load: KVLoad) -> bool:
        is_good = (self.rng or random).random() >= self.fails
        names = NamedPrefixes(load.request.token_ids[: load.end_tokens]).prefixes
        for manager, slots, ids in zip(self.device.managers, self.device.slots, load.block_ids, strict=True):
            if manager.is_state:
                slots[ids[0]][0] = names[-1] if is_good else b"broken"
                continue
            for position in range(load.num_local_tokens, load.end_tokens):
                block_id = ids[position // manager.block_size]
                if block_id != NULL_BLOCK_ID:
                    slots[block_id][position % manager.block_size] = names[position] if is_good else b"broken"
        return is_good
