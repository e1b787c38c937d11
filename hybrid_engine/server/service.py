"""What all routes share: admission to the engine, deadlines, salts, and what is counted."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass

from hybrid_engine.async_engine import AnswerStream, AsyncEngine, OnNews
from hybrid_engine.engine import Prompt
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.server.api_errors import ApiError, ClientGoneError
from hybrid_engine.server.cache_log import CacheLog, describe_engine
from hybrid_engine.server.metrics import ServerMetrics
from hybrid_engine.server.prefixes import PrefixUse
from hybrid_engine.server.settings import ServerSettings
from hybrid_engine.server.text_worker import TextWorker
from hybrid_engine.snapshot import EngineSnapshot, take_snapshot

MAX_RETRY_AFTER_SECONDS = 60
SERVICE_TIERS = {"priority": -10, "fast": -10, "auto": 0, "default": 0, "scale": 0, "flex": 10}
"""OpenAI's classes of service, as priorities: the lower, the sooner."""


class Service:
    """One engine, and who may ask it for how much."""

    def __init__(self, engine: AsyncEngine, settings: ServerSettings) -> None:
        self.engine = engine
        self.settings = settings
        self.metrics = ServerMetrics(settings.model_name)
        self.prefixes = PrefixUse()
        self.text = TextWorker(engine.tokenizer, chat_template=settings.chat_template)
        self.cache_log = CacheLog(settings.cache_log, model=settings.model_name) if settings.cache_log else None
        self.start_time = int(time.time())
        self._max_in_flight = settings.max_concurrency or engine.max_num_seqs + settings.max_queue
        self._num_in_flight = 0
        self._mean_seconds = 1.0

    @property
    def num_in_flight(self) -> int:
        """Answers accepted and not ended."""
        return self._num_in_flight

    def close(self) -> None:
        """Let go of threads and files."""
        self.text.close()
        if self.cache_log is not None:
            self.cache_log.close()

    async def snapshot(self) -> EngineSnapshot:
        """Look at the engine between two steps."""
        return await self.engine.call(take_snapshot)

    def check_model(self, name: str | None) -> str:
        """Return the name under which to answer. Raises ApiError for a model that isn't here."""
        if name is None:
            return self.settings.model_name
        if name not in self.settings.model_names:
            raise ApiError(
                404,
                f"the model {name!r:.200} isn't served here; there is {', '.join(self.settings.model_names)}",
                code="model_not_found",
                param="model",
            )
        return name

    def check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        """Raise ApiError for tokens that no vocabulary has."""
        limit = self.engine.vocab_size
        wrong = next((index for index, token_id in enumerate(token_ids) if not 0 <= token_id < limit), None)
        if wrong is not None:
            raise ApiError(
                400,
                f"{name}[{wrong}] is {token_ids[wrong]}, must be from 0 to {limit - 1} (the vocabulary)",
                code="invalid_value",
                param=name,
            )

    def priority(self, priority: int | None, service_tier: str | None = None) -> int:
        """Return the priority of a request: its own, else its class's. Raises ApiError for one that is ignored."""
        if priority is None and self.engine.has_priorities and service_tier is not None:
            return _class_priority(service_tier)
        if priority and not self.engine.has_priorities:
            raise ApiError(
                400,
                f"priority is {priority}, must be 0: this server answers in the order of arrival",
                code="invalid_value",
                param="priority",
            )
        return priority or 0

    def salt(self, tenant: str | None, cache_salt: str | None) -> str:
        """Return under which salt a client's prefixes are cached: clients with different keys share none."""
        if tenant is None or self.settings.share_cache:
            return cache_salt or ""
        return json.dumps([tenant, cache_salt or ""])

    def is_own_salt(self, tenant: str | None, salt: str) -> bool:
        """Return whether a client may know what is cached under a salt that `salt` has returned for it or another."""
        return tenant is None or self.settings.share_cache or json.loads(salt)[0] == tenant

    async def submit(self, prompts: Sequence[Prompt], *, timeout_seconds: float | None = None) -> Answering:
        """Have prompts answered; whoever gets the Answering must close it.

        Raises ApiError when too many wait, RequestError when a prompt can't be run, and EngineDeadError.
        """
        num_answers = sum(prompt.sampling.n for prompt in prompts)
        self._admit(num_answers)
        try:
            if self.cache_log is not None:
                await self._begin_log(self.cache_log, prompts)
            stream = await self.engine.submit(prompts)
        except BaseException:
            self._change_in_flight(-num_answers)
            self.end_log(prompts)
            raise
        limits = [seconds for seconds in (timeout_seconds, self.settings.request_timeout_seconds) if seconds]
        return Answering(self, stream, prompts, timeout_seconds=min(limits, default=None))

    async def _begin_log(self, log: CacheLog, prompts: Sequence[Prompt]) -> None:
        if not log.has_header:
            described = await self.engine.call(describe_engine)
            if not log.has_header:  # nobody was faster
                log.write_header(described)
        log.begin(prompts)

    def end_log(self, prompts: Sequence[Prompt]) -> None:
        """Log what was answered of prompts that nobody waits for any more; those that have ended were logged."""
        if self.cache_log is not None:
            self.cache_log.abandon([prompt.request_id for prompt in prompts])

    def _admit(self, num_answers: int) -> None:
        if num_answers > self._max_in_flight:
            raise ApiError(
                400,
                f"{num_answers} answers are asked for at once, at most {self._max_in_flight} fit: send fewer prompts, "
                f"or a smaller n",
                code="invalid_value",
                param="n",
            )
        if self._num_in_flight + num_answers > self._max_in_flight:
            waiting = max(self._num_in_flight - self.engine.max_num_seqs, 0)
            seconds = math.ceil(self._mean_seconds * (1 + waiting / self.engine.max_num_seqs))
            raise ApiError(
                429,
                f"{self._num_in_flight} answers are in flight, at most {self._max_in_flight} may be: try again later",
                code="queue_full",
                headers={"Retry-After": str(min(max(seconds, 1), MAX_RETRY_AFTER_SECONDS))},
            )
        self._change_in_flight(num_answers)

    def _change_in_flight(self, change: int) -> None:
        self._num_in_flight += change
        self.metrics.in_flight.set(self._num_in_flight)

    def _release(self, num_answers: int, seconds: float | None) -> None:
        self._change_in_flight(-num_answers)
        if seconds is not None:
            self._mean_seconds += 0.1 * (seconds - self._mean_seconds)


def _class_priority(service_tier: str) -> int:
    if service_tier not in SERVICE_TIERS:
        raise ApiError(
            400,
            f"service_tier is {service_tier!r:.60}, must be one of {', '.join(SERVICE_TIERS)}",
            code="invalid_value",
            param="service_tier",
        )
    return SERVICE_TIERS[service_tier]


class Answering:
    """What is new of some prompts, as it comes; counts it, and ends at the deadline."""

    def __init__(
        self, service: Service, stream: AnswerStream, prompts: Sequence[Prompt], *, timeout_seconds: float | None
    ) -> None:
        self._service = service
        self._stream = stream
        self._prompts = prompts
        self._salt = prompts[0].cache_salt  # a request has one, however many its prompts are
        self._start = time.monotonic()
        self._is_closed = False
        self._is_whole = False
        self._noted_prompts: set[str] = set()
        self._answers: dict[tuple[str, int], _Progress] = {}
        """Answers that go on, by prompt and index."""
        self._timer: asyncio.TimerHandle | None = None
        if timeout_seconds is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(timeout_seconds, self._time_out, timeout_seconds)

    async def read(self) -> list[RequestOutput]:
        """Wait for what is new and return all of it; nothing when all has been read."""
        ready = await self._stream.read()
        self._is_whole = not ready
        self._note(ready)
        return ready

    async def watch(self, on_news: OnNews) -> None:
        """Have a function called with all that is new as soon as it comes; see AnswerStream."""

        def note(ready: list[RequestOutput]) -> Awaitable[None] | None:
            self._note(ready)
            return on_news(ready)

        await self._stream.watch(note)
        self._is_whole = True

    def abandon(self) -> None:
        """End it because the client is gone; a reader that waits gets ClientGoneError."""
        self.close(ClientGoneError(), reason="disconnect")

    def close(self, error: Exception | None = None, *, reason: str = "error") -> None:
        """End what still runs; may be called again. error: what a reader that waits gets."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._stream.close(error)
        if not self._is_whole:
            self._service.metrics.note_aborted(reason)
        self._service.end_log(self._prompts)
        num_answers = sum(prompt.sampling.n for prompt in self._prompts)
        self._service._release(num_answers, time.monotonic() - self._start if self._is_whole else None)

    def _time_out(self, seconds: float) -> None:
        error = ApiError(
            504, f"the answer wasn't there after {seconds:g} seconds: it was ended", code="deadline_exceeded"
        )
        self.close(error, reason="deadline")

    def _note(self, ready: Sequence[RequestOutput]) -> None:
        """Count what is new, all of it at once: an answer's tokens that come together share the time before them."""
        metrics, now = self._service.metrics, time.monotonic()
        told: dict[tuple[str, int], _Progress] = {}
        for delta in ready:
            if self._service.cache_log is not None:
                self._service.cache_log.note(delta)
            if delta.request_id not in self._noted_prompts:
                self._noted_prompts.add(delta.request_id)
                metrics.note_prompt(delta)
                self._service.prefixes.note(self._salt, delta.prompt_token_ids, delta.num_cached_tokens)
            for output in delta.outputs:
                key = (delta.request_id, output.index)
                answer = told[key] = self._answers.get(key) or self._answers.setdefault(key, _Progress())
                answer.num_new += len(output.token_ids)
                if output.finish_reason is not None:
                    del self._answers[key]
                    num_tokens = answer.num_tokens + answer.num_new
                    metrics.note_end(output.finish_reason, num_tokens, time.time() - delta.metrics.arrival_time)
        for answer in told.values():
            if not answer.num_new:
                continue  # a text that was held back
            metrics.news.note(answer.num_new, None if answer.last_news is None else now - answer.last_news)
            answer.num_tokens += answer.num_new
            answer.num_new, answer.last_news = 0, now


@dataclass(slots=True)
class _Progress:
    """How far an answer is."""

    num_tokens: int = 0
    num_new: int = 0
    """Tokens that are not counted yet."""
    last_news: float | None = None
