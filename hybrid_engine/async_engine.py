"""The engine behind asyncio: one thread steps the synchronous core, every request is an async stream of what is new.

All that touches the core happens on that thread, between steps, in the order in which it was asked. A step that fails
ends the engine: every stream, and every later call, raises EngineDeadError.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar, Unpack

from transformers import PreTrainedTokenizerBase

from hybrid_engine import tiny_hybrid
from hybrid_engine.engine import Engine, Prompt
from hybrid_engine.errors import EngineDeadError
from hybrid_engine.outputs import OutputCollector, RequestOutput
from hybrid_engine.startup import EnginePlan, EngineSettings, make_config, start_engine

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnNews = Callable[[list[RequestOutput]], Awaitable[None] | None]


class AnswerStream(AsyncIterator[RequestOutput]):
    """What is new of some prompts that were submitted together, as it comes; closing it ends those that still run."""

    def __init__(self, request_ids: Sequence[str], *, abort: Callable[[Sequence[str]], None]) -> None:
        """abort: ends requests of the engine."""
        self._unfinished = set(request_ids)
        self._abort = abort
        self._deltas: deque[RequestOutput] = deque()
        self._error: Exception | None = None
        self._reader: asyncio.Future[Awaitable[None] | None] | None = None
        """What waits for news; its result is what must be waited for before more is taken."""
        self._on_news: OnNews | None = None
        """What takes news as soon as they come."""

    async def __anext__(self) -> RequestOutput:
        await self._wait()
        if not self._deltas:
            raise StopAsyncIteration
        return self._deltas.popleft()

    async def read(self) -> list[RequestOutput]:
        """Wait for what is new and return all of it, several steps' where the reader is behind; nothing: it is over."""
        if not self._deltas:
            await self._wait()
        return self._take()

    async def watch(self, on_news: OnNews) -> None:
        """Have a function called with all that is new as soon as it comes, until it is over.

        That saves the turn of the loop in which a reader would wake up. The function may return what must be waited for
        before it takes more: what comes meanwhile it then gets at once.
        """
        while True:
            while self._deltas:
                if (blocked := on_news(self._take())) is not None:
                    await blocked
            if self._is_over():
                return
            self._on_news = on_news
            try:
                blocked = await self._news()
            finally:
                self._on_news = None
            if blocked is not None:
                await blocked

    async def collect(self) -> list[RequestOutput]:
        """Wait for the end and return each prompt's whole output, in the order in which they first had news."""
        collectors: dict[str, OutputCollector] = {}
        async for delta in self:
            collectors.setdefault(delta.request_id, OutputCollector()).add(delta)
        return [collector.output() for collector in collectors.values()]

    def close(self, error: Exception | None = None) -> None:
        """End what still runs; what was not read yet is dropped. A reader that waits gets the error, or the end."""
        self._deltas.clear()
        unfinished, self._unfinished = self._unfinished, set()
        self._error = error
        self._wake()
        if unfinished:
            self._abort(sorted(unfinished))

    async def _wait(self) -> None:
        """Return when there is something to read, or nothing comes any more."""
        while not self._deltas and not self._is_over():
            await self._news()

    def _is_over(self) -> bool:
        """Return whether nothing comes any more; raises why, where it did not end by itself."""
        if self._error is not None:
            raise self._error
        return not self._unfinished

    async def _news(self) -> Awaitable[None] | None:
        # A bare future: an Event costs a stream more than all that is done with the token.
        assert self._reader is None or self._reader.done(), "a stream has one reader"
        self._reader = asyncio.get_running_loop().create_future()
        return await self._reader

    def _take(self) -> list[RequestOutput]:
        ready = list(self._deltas)
        self._deltas.clear()
        return ready

    def _wake(self, blocked: Awaitable[None] | None = None) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(blocked)

    def _add(self, delta: RequestOutput) -> None:
        if delta.request_id not in self._unfinished:
            return  # it was closed while the step ran
        if delta.finished:
            self._unfinished.discard(delta.request_id)
        self._deltas.append(delta)

    def _tell(self) -> None:
        """Have who waits or watches learn what was added. An error is the watcher's: others have news too."""
        if self._on_news is None:
            self._wake()
            return
        if not self._deltas:
            return
        try:
            blocked = self._on_news(self._take())
        except Exception as error:
            self._on_news = None
            if self._reader is not None and not self._reader.done():
                self._reader.set_exception(error)
            return
        if blocked is not None:
            self._on_news = None
        if blocked is not None or not self._unfinished:
            self._wake(blocked)


class AsyncEngine:
    """Drives one engine from one event loop. All methods but `load` are to be called in that loop."""

    def __init__(self, engine: Engine, plan: EnginePlan | None = None) -> None:
        """engine: from now on ours; nobody else may call it. plan: what it is made of, where that is known."""
        self.plan = plan
        self.max_model_len = engine.max_model_len
        self.vocab_size = engine.vocab_size
        self.has_priorities = engine.scheduler.config.policy == "priority"
        """Whether the scheduler looks at the priority of a prompt."""
        self.max_num_seqs = engine.scheduler.config.max_num_seqs
        self._engine = engine
        self._streams: dict[str, AnswerStream] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._news_interval = 0.0
        self._news: deque[RequestOutput] = deque()
        """What steps gave and no stream has yet; the engine's thread puts it there, the loop takes it."""
        self._silent: set[str] = set()
        """Requests that had no news yet; only the engine's thread touches them."""
        self._is_delivery_due = False
        """Whether the loop looks for news by itself, soon."""
        self._thread: threading.Thread | None = None
        self._commands: deque[Callable[[], None]] = deque()
        self._has_work = threading.Condition()
        self._is_closing = False
        self._is_over = False
        self._failure: EngineDeadError | None = None
        self.on_death: Callable[[EngineDeadError], None] = lambda error: None
        """Called in the loop when a step has failed, after all streams were told."""

    @classmethod
    def load(cls, model: str | Path = tiny_hybrid.NAME, **settings: Unpack[EngineSettings]) -> AsyncEngine:
        """Load a model; see LLM. Raises ConfigError or CheckpointError."""
        return cls(*start_engine(make_config(tiny_hybrid.find_model(model), **settings)))

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The engine's own, which its thread uses: copy it to use it elsewhere."""
        return self._engine.tokenizer

    @property
    def failure(self) -> EngineDeadError | None:
        """Why the engine is dead; None while it lives."""
        return self._failure

    def start(self, *, news_interval_seconds: float = 0.0) -> None:
        """Start the thread. To be called once, in the loop that will use the engine.

        news_interval_seconds: the news of steps that follow each other faster wait for each other, so that streams are
        told so seldom; a request's first and last ones don't wait. 0: streams are told of every step.
        """
        assert self._thread is None, "the engine was started before"
        self._loop = asyncio.get_running_loop()
        self._news_interval = news_interval_seconds
        self._thread = threading.Thread(target=self._run, name="hybrid-engine-driver", daemon=True)
        self._thread.start()

    async def submit(self, prompts: Sequence[Prompt]) -> AnswerStream:
        """Have prompts answered and return the stream of what is new of all of them.

        Raises RequestError, having accepted none of them, when one can't be run, and EngineDeadError.
        """
        request_ids = [prompt.request_id for prompt in prompts]
        stream = AnswerStream(request_ids, abort=self._abort)
        self._streams |= dict.fromkeys(request_ids, stream)

        def add(engine: Engine) -> None:
            engine.add_requests(prompts)
            self._silent.update(request_ids)

        try:
            await self.call(add)
        except BaseException:
            # Also when the caller gave up waiting: the engine may accept them afterwards.
            stream.close()
            raise
        return stream

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Run a function of the engine between two steps, on its thread, and return what it returned or raised."""
        loop = self._loop
        assert loop is not None, "the engine was not started"
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function(self._engine)
            except Exception as error:
                self._post(_settle, future, None, error)
            else:
                self._post(_settle, future, result, None)

        if not self._command(run):
            raise EngineDeadError(str(self._failure or "the engine was closed"))
        return await future

    async def reset_prefix_cache(self) -> None:
        """Forget all cached prefixes."""
        await self.call(Engine.reset_prefix_cache)

    async def close(self) -> None:
        """End the thread after the step in flight; requests in flight end with EngineDeadError."""
        with self._has_work:
            self._is_closing = True
            self._has_work.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
        self._fail_streams("it was closed")

    def _abort(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._streams.pop(request_id, None)

        def run() -> None:
            self._silent.difference_update(request_ids)
            for request_id in request_ids:
                self._engine.abort(request_id)

        self._command(run)

    def _command(self, command: Callable[[], None]) -> bool:
        """Have the engine's thread run something; return False when there is no thread any more."""
        with self._has_work:
            if self._is_over:
                return False
            self._commands.append(command)
            self._has_work.notify()
            return True

    # On the engine's thread

    def _run(self) -> None:
        try:
            while self._run_commands():
                self._give_out(self._engine.step())
            self._engine.close()
        except BaseException as error:
            logger.critical("the engine is dead", exc_info=error)
            self._failure = error if isinstance(error, EngineDeadError) else EngineDeadError(f"it failed: {error!r}")
        with self._has_work:
            self._is_over = True
            left = list(self._commands)
            self._commands.clear()
        for command in left:
            command()
        if self._failure is not None:
            self._post(self._die)

    def _give_out(self, outputs: Sequence[RequestOutput]) -> None:
        """Have the loop deliver what a step gave: now where it is due or may not wait, else with that of later steps.

        May not wait: a request's first news, and its last.
        """
        if not outputs:
            return
        self._news.extend(outputs)
        is_urgent = any([output.finished for output in outputs])
        if self._silent:
            num_silent = len(self._silent)
            self._silent.difference_update([output.request_id for output in outputs])
            is_urgent = is_urgent or len(self._silent) < num_silent
        # Looked at when the news are there: a delivery that begins just now takes them, or is seen to be due no more.
        if is_urgent or not self._is_delivery_due:
            self._post(self._deliver)

    def _run_commands(self) -> bool:
        """Do all that was asked, waiting while there is nothing to do; return whether there is a step to run."""
        while True:
            with self._has_work:
                while not (self._commands or self._is_closing or self._engine.has_unfinished_requests()):
                    self._has_work.wait()
                if self._is_closing:
                    return False
                commands = list(self._commands)
                self._commands.clear()
            for command in commands:
                command()
            if self._engine.has_unfinished_requests():
                return True

    def _post(self, function: Callable[..., None], *arguments: Any) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *arguments)

    # In the loop again

    def _deliver(self) -> None:
        """Give streams their news; where there were any, look again after the interval."""
        told: dict[AnswerStream, None] = {}
        while self._news:
            output = self._news.popleft()
            stream = self._streams.get(output.request_id)
            if stream is None:
                continue
            stream._add(output)
            told[stream] = None
            if output.finished:
                del self._streams[output.request_id]
        if told and self._news_interval and not self._is_delivery_due:
            assert self._loop is not None
            self._is_delivery_due = True
            self._loop.call_later(self._news_interval, self._deliver_when_due)
        for stream in told:
            stream._tell()

    def _deliver_when_due(self) -> None:
        self._is_delivery_due = False
        self._deliver()

    def _die(self) -> None:
        assert self._failure is not None
        self._fail_streams(str(self._failure))
        self.on_death(self._failure)

    def _fail_streams(self, why: str) -> None:
        self._deliver()
        for stream in set(self._streams.values()):
            stream.close(EngineDeadError(why))
        self._streams.clear()


def _settle(future: asyncio.Future[T], result: T, error: Exception | None) -> None:
    if future.done():
        return  # whoever waited was cancelled
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
