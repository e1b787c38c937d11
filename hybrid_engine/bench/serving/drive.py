"""Asks a workload of a server: as many sessions at once as there are clients, or as they arrive."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybrid_engine.bench.serving.client import Answer, Server, find_model
from hybrid_engine.bench.serving.workload import Session
from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

IDLE_SECONDS = 1.0
"""A connection that lay idle for so long is not used again."""


@dataclass(frozen=True)
class DriveSettings:
    """How it is asked. Raises ConfigError for what can't be."""

    concurrency: int | None = 8
    """Sessions at once; None: all that have arrived."""
    sessions_per_second: float | None = None
    """Sessions arrive at random (a Poisson process) this often; None: the next comes when one has ended."""
    think_seconds: float = 0.0
    """Between an answer and the next request of its session."""
    num_warmup: int = 1
    """Requests sent before, and not counted."""
    timeout_seconds: float = 600.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}, must be at least 1")
        if self.sessions_per_second is not None and self.sessions_per_second <= 0:
            raise ConfigError(f"request rate is {self.sessions_per_second}, must be above 0")
        if self.concurrency is None and self.sessions_per_second is None:
            raise ConfigError("there is neither a concurrency nor a request rate: give one of them, or both")


@dataclass(frozen=True)
class Drive:
    """What was asked and answered."""

    answers: list[Answer]
    seconds: float
    max_in_flight: int
    """Most requests at once."""


async def drive(
    server: Server, sessions: Sequence[Session], settings: DriveSettings, *, on_answer: Callable[[], Any] = lambda: None
) -> Drive:
    """Ask all sessions and return what came of them."""
    answers: list[Answer] = []
    in_flight = max_in_flight = 0

    async def ask(session: Session) -> None:
        nonlocal in_flight, max_in_flight
        for index, each in enumerate(session):
            if index and settings.think_seconds:
                await asyncio.sleep(settings.think_seconds)
            in_flight += 1
            max_in_flight = max(max_in_flight, in_flight)
            answer = await server.ask(each)
            in_flight -= 1
            answers.append(answer)
            on_answer()
            if answer.error is not None:
                return  # what follows would be another conversation

    start = time.perf_counter()
    if settings.sessions_per_second is None:
        await _closed_loop(ask, sessions, settings.concurrency or len(sessions))
    else:
        await _open_loop(ask, sessions, settings)
    return Drive(answers, time.perf_counter() - start, max_in_flight)


async def _closed_loop(ask: Callable[[Session], Any], sessions: Sequence[Session], concurrency: int) -> None:
    left: Iterator[Session] = iter(sessions)

    async def work() -> None:
        for session in left:  # shared by all: each takes the next one
            await ask(session)

    await asyncio.gather(*(work() for _ in range(min(concurrency, len(sessions)))))


async def _open_loop(ask: Callable[[Session], Any], sessions: Sequence[Session], settings: DriveSettings) -> None:
    assert settings.sessions_per_second is not None
    rng = random.Random(settings.seed)
    places = asyncio.Semaphore(settings.concurrency or len(sessions))

    async def arrive(session: Session) -> None:
        async with places:
            await ask(session)

    due, tasks = time.perf_counter(), []
    for session in sessions:
        due += rng.expovariate(settings.sessions_per_second)
        await asyncio.sleep(max(due - time.perf_counter(), 0))
        tasks.append(asyncio.create_task(arrive(session)))
    await asyncio.gather(*tasks)


@asynccontextmanager
async def connect(url: str, *, model: str | None, api_key: str | None, timeout_seconds: float) -> AsyncIterator[Server]:
    """Reach a server. url: with or without /v1 at its end. model: None: the first that the server has.

    Raises ConfigError when there is none.
    """
    try:
        import httpx2
    except ImportError as error:
        raise ConfigError("bench serve needs httpx2: pip install 'hybrid-engine[client]'") from error
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    # Servers close what lies idle (llama-server after 5 seconds, as httpx2 would): no request may meet that moment.
    limits = httpx2.Limits(max_connections=None, keepalive_expiry=IDLE_SECONDS)
    base = url.rstrip("/").removesuffix("/v1")
    async with httpx2.AsyncClient(base_url=base, headers=headers, timeout=timeout_seconds, limits=limits) as http:
        yield Server(http, model or await find_model(http))
