"""Many agents at once on the tiny trained hybrid, some of them rude: nothing is mixed up, lost or left behind.

HYBRID_ENGINE_STRESS_SECONDS says how long the first run takes (60).
"""

import asyncio
import os
import signal
import threading
import time
from contextlib import suppress

import httpx2
import pytest
from agents import Agent, Counts, run_agents
from live_server import wait_until
from served import Served

NUM_AGENTS = 64
SECONDS = float(os.environ.get("HYBRID_ENGINE_STRESS_SECONDS", "60"))
SERVE = ("--dtype", "float32", "--memory", "24MiB", "--no-access-log", "--drain-timeout", "60")
MAX_GROWTH_BYTES = 48 << 20
"""Of memory while agents talk: caches of tokenizers and grammars fill up, the allocator keeps what it had at once."""


@pytest.fixture
def serve():
    started = []

    def start(*options: str) -> Served:
        started.append(Served("tiny-hybrid", *SERVE, *options))
        return started[-1]

    yield start
    for served in started:
        served.end()


def report(name: str, counts: Counts) -> None:
    print(
        f"{name}: {counts.answers} answers, {len(counts.wrong)} wrong, "
        f"{counts.misremembered} misremembered, {counts.left} left, {counts.refused} refused, "
        f"{counts.waited} told to wait, {counts.late} too late; gaps between news: p50 {counts.gap(50) * 1e3:.1f} ms, "
        f"p99 {counts.gap(99) * 1e3:.1f} ms"
    )


@pytest.mark.timeout(SECONDS + 240)
def test_agents_get_their_own_answers_and_leave_nothing_behind(serve):
    served = serve("--max-num-seqs", "16", "--max-queue", "30", "--host-cache", "16MiB")
    asyncio.run(run_agents(served.url, NUM_AGENTS, SECONDS / 5))
    wait_until(served.is_idle)
    memory, num_files, num_threads = served.rss_bytes(), served.num_files(), served.num_threads()
    counts = asyncio.run(run_agents(served.url, NUM_AGENTS, SECONDS))
    report(f"{SECONDS:g} s", counts)
    assert min(counts.answers, counts.left, counts.refused, counts.waited) > 0
    assert counts.wrong == []
    assert counts.cut == 0
    wait_until(served.is_idle)
    wait_until(lambda: served.num_files() <= num_files + 4)
    print(f"memory {memory >> 20} MiB, then {served.rss_bytes() >> 20} MiB")
    assert served.rss_bytes() < memory + MAX_GROWTH_BYTES
    assert served.num_threads() <= num_threads + 2
    assert httpx2.get(f"{served.url}/health").status_code == 200


@pytest.mark.slow
def test_a_server_that_is_told_to_end_under_load_lets_every_answer_end(serve):
    served = serve()
    counts = Counts()

    async def talk() -> None:
        async with httpx2.AsyncClient(base_url=served.url, timeout=120) as http:

            async def one(number: int) -> None:
                agent = Agent(number, http, counts, is_rude=False)
                agent.begin()
                try:
                    while await agent.turn():
                        pass
                except httpx2.TransportError:
                    pass  # a new request, after the end

            await asyncio.gather(*(one(number) for number in range(16)))

    threading.Timer(3, served.process.send_signal, (signal.SIGTERM,)).start()
    asyncio.run(talk())
    assert served.process.wait(90) == 0
    report("ended", counts)
    assert counts.answers > 16
    assert (counts.wrong, counts.cut) == ([], 0)


@pytest.mark.slow
def test_after_a_kill_the_disk_cache_gives_right_answers_or_none(serve, tmp_path):
    options = ("--disk-cache", str(tmp_path), "--disk-cache-size", "256MiB")
    served = serve(*options)
    counts = Counts()
    agents = []

    async def talk(url: str, num_turns: int) -> None:
        async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
            for agent in agents:
                agent.http = http
            await asyncio.gather(*(turns(agent, num_turns) for agent in agents))

    async def turns(agent: Agent, count: int) -> None:
        for _ in range(count):
            await agent.turn()

    for number in range(24):
        agents.append(Agent(number, None, counts, is_rude=False))
        agents[-1].begin()
    asyncio.run(talk(served.url, 4))
    assert httpx2.post(f"{served.url}/cache/save", json={}, timeout=60).status_code == 200
    # Killed while others write.
    others = threading.Thread(target=lambda: _ignore_errors(served.url), daemon=True)
    others.start()
    time.sleep(2)
    served.process.kill()
    served.process.wait(30)
    again = serve(*options)
    asyncio.run(talk(again.url, 3))
    report("after the kill", counts)
    assert (counts.answers, counts.wrong) == (24 * 7, [])
    assert again.cache()["tiers"]["num_loads"] > 0
    others.join(30)


def _ignore_errors(url: str) -> None:
    with suppress(httpx2.HTTPError):  # the server is killed meanwhile
        asyncio.run(run_agents(url, 16, 30))
