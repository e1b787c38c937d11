"""One thread steps the engine; streams of several requests in one event loop."""

import asyncio
import threading

import pytest
from scripted_engine import EOS

from hybrid_engine.async_engine import AsyncEngine
from hybrid_engine.engine import Prompt
from hybrid_engine.errors import EngineDeadError, RequestError
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.snapshot import take_snapshot

LONG = SamplingParams(max_tokens=300)


def run(engine, use, **options):
    """Start the engine in a loop, let an async function use it, and end it. options: see AsyncEngine.start."""

    async def main():
        wrapped = AsyncEngine(engine)
        wrapped.start(**options)
        try:
            return await asyncio.wait_for(use(wrapped), 30)
        finally:
            await wrapped.close()

    return asyncio.run(main())


def prompts(ids, *texts, sampling=LONG):
    return [Prompt(text, ids(text), sampling) for text in texts]


def test_prompts_submitted_together_come_back_in_one_stream(scripted, ids):
    async def use(engine):
        stream = await engine.submit(prompts(ids, "one", "two"))
        return {output.request_id: output.outputs[0].text for output in await stream.collect()}

    assert run(scripted("hello"), use) == {"one": "hello", "two": "hello"}


def test_streams_go_on_side_by_side(scripted, ids):
    async def use(engine):
        streams = [await engine.submit(prompts(ids, text)) for text in ("one", "two")]
        outputs = await asyncio.gather(*(stream.collect() for stream in streams))
        return [output[0].outputs[0].text for output in outputs]

    assert run(scripted("hello"), use) == ["hello", "hello"]


def test_a_prompt_that_cannot_run_is_refused_and_nothing_is_left(scripted, ids):
    async def use(engine):
        with pytest.raises(RequestError, match="None of them was accepted"):
            await engine.submit([*prompts(ids, "one"), Prompt("two", [], LONG)])
        snapshot = await engine.call(take_snapshot)
        return snapshot.num_running + snapshot.num_waiting, engine._streams

    assert run(scripted("hello"), use) == (0, {})


def test_closing_a_stream_ends_its_requests(scripted, ids):
    async def use(engine):
        stream = await engine.submit(prompts(ids, "one", "two"))
        await anext(stream)
        stream.close()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        snapshot = await engine.call(take_snapshot)
        return snapshot.num_running, [group.num_held for group in snapshot.groups], engine._streams

    assert run(scripted(lambda request: ids("x" * 300)), use) == (0, [0, 0], {})


def test_who_stops_waiting_to_be_accepted_leaves_nothing_behind(scripted, ids):
    may_step = threading.Event()

    async def use(engine):
        first = await engine.submit(prompts(ids, "one"))
        waiting = asyncio.create_task(engine.submit(prompts(ids, "two")))
        await asyncio.sleep(0.01)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        may_step.set()
        await first.collect()
        return (await engine.call(take_snapshot)).num_running, engine._streams

    engine = scripted("hello", before_step=lambda plan: may_step.wait(10))
    assert run(engine, use) == (0, {})


def test_a_step_that_fails_ends_all_streams_and_every_later_call(scripted, ids):
    def fail(plan):
        if len(plan.request_ids) == 2:
            raise MemoryError("no more")

    async def use(engine):
        deaths = []
        engine.on_death = deaths.append
        streams = [await engine.submit(prompts(ids, text)) for text in ("one", "two")]
        for stream in streams:
            with pytest.raises(EngineDeadError, match="no more"):
                await stream.collect()
        with pytest.raises(EngineDeadError, match="no more"):
            await engine.submit(prompts(ids, "three"))
        return len(deaths), engine.failure is not None

    assert run(scripted(lambda request: [*ids("x" * 50), EOS], before_step=fail), use) == (1, True)


def test_closing_the_engine_ends_what_runs(scripted, ids):
    async def use(engine):
        stream = await engine.submit(prompts(ids, "one"))
        await engine.close()
        with pytest.raises(EngineDeadError, match="closed"):
            await stream.collect()
        with pytest.raises(EngineDeadError, match="closed"):
            await engine.call(take_snapshot)

    run(scripted(lambda request: ids("x" * 300)), use)


def test_a_reader_that_is_behind_catches_up_at_once(scripted, ids):
    async def use(engine):
        stream = await engine.submit(prompts(ids, "one"))
        while (await engine.call(take_snapshot)).num_running:
            pass
        first, rest = await anext(stream), await stream.read()
        return "".join(delta.outputs[0].text for delta in [first, *rest]), await stream.read()

    assert run(scripted("hello"), use) == ("hello", [])


def test_who_watches_is_told_each_step_at_once_and_what_it_missed_while_it_was_blocked(scripted, ids):
    steps = threading.Semaphore(0)

    async def use(engine):
        stream = await engine.submit(prompts(ids, "one"))
        told, gate = [], asyncio.Event()

        def on_news(ready):
            told.append("".join(delta.outputs[0].text for delta in ready))
            steps.release(1 if len(told) == 1 else 100)
            return gate.wait() if len(told) == 2 else None

        watching = asyncio.create_task(stream.watch(on_news))
        await asyncio.sleep(0)
        steps.release()
        while (await engine.call(take_snapshot)).num_running:
            pass
        before = list(told)
        gate.set()
        await watching
        return before, told

    before, told = run(scripted("hello", before_step=lambda plan: steps.acquire(timeout=10)), use)
    assert before == ["h", "e"]
    assert told == ["h", "e", "llo"]


def test_between_the_first_news_and_the_last_those_of_fast_steps_come_together(scripted, ids):
    steps = threading.Semaphore(0)

    async def use(engine):
        stream, told = await engine.submit(prompts(ids, "one")), []

        def on_news(ready):
            told.append("".join(delta.outputs[0].text for delta in ready))
            steps.release(100)

        watching = asyncio.create_task(stream.watch(on_news))
        await asyncio.sleep(0)
        steps.release()
        await watching
        return told, engine._silent

    # An hour: what comes at once doesn't wait for it.
    engine = scripted("hello", before_step=lambda plan: steps.acquire(timeout=10))
    assert run(engine, use, news_interval_seconds=3600) == (["h", "ello"], set())


def test_news_wait_for_no_step_longer_than_the_interval(scripted, ids):
    steps = threading.Semaphore(3)

    async def use(engine):
        stream, text = await engine.submit(prompts(ids, "one")), ""
        while len(text) < 3:  # the fourth step begins and doesn't end
            text += "".join(delta.outputs[0].text for delta in await stream.read())
        steps.release(100)
        return text

    engine = scripted("hello", before_step=lambda plan: steps.acquire(timeout=20))
    assert run(engine, use, news_interval_seconds=0.01) == "hel"


def test_news_that_wait_are_told_before_the_death_of_the_engine(scripted, ids):
    may_step, countdown = threading.Event(), iter(range(3, -1, -1))

    def fail(plan):
        assert may_step.wait(10)
        if next(countdown) == 0:
            raise MemoryError("no more")

    async def use(engine):
        stream, told = await engine.submit(prompts(ids, "one")), []
        watching = asyncio.create_task(
            stream.watch(lambda ready: told.append("".join(delta.outputs[0].text for delta in ready)))
        )
        await asyncio.sleep(0)
        may_step.set()
        with pytest.raises(EngineDeadError, match="no more"):
            await watching
        return told

    assert "".join(run(scripted("hello", before_step=fail), use, news_interval_seconds=3600)) == "hel"


def test_a_request_that_was_ended_before_its_first_news_is_forgotten(scripted, ids):
    may_step = threading.Event()

    async def use(engine):
        stream = await engine.submit(prompts(ids, "one"))
        stream.close()
        may_step.set()
        await engine.call(take_snapshot)
        return engine._silent

    engine = scripted("hello", before_step=lambda plan: may_step.wait(10))
    assert run(engine, use, news_interval_seconds=3600) == set()


def test_an_error_of_who_watches_is_its_own_and_other_streams_go_on(scripted, ids):
    def fail(ready):
        raise OSError("nobody reads")

    async def use(engine):
        streams = [await engine.submit(prompts(ids, text)) for text in ("one", "two")]
        results = await asyncio.gather(streams[0].watch(fail), streams[1].collect(), return_exceptions=True)
        streams[0].close()
        return results[0], results[1][0].outputs[0].text

    error, text = run(scripted("hello"), use)
    assert (str(error), text) == ("nobody reads", "hello")


def test_who_watches_is_told_why_the_stream_was_closed(scripted, ids):
    async def use(engine):
        stream = await engine.submit(prompts(ids, "one"))
        watching = asyncio.create_task(stream.watch(lambda ready: None))
        await asyncio.sleep(0)
        stream.close(ValueError("enough"))
        with pytest.raises(ValueError, match="enough"):
            await watching

    run(scripted(lambda request: ids("x" * 300)), use)
