"""Many agents at once, some of them rude: each gets its own answers, and nothing is left behind.

HYBRID_ENGINE_STRESS_SECONDS says for how long (20).
"""

import asyncio
import json
import os
import random
import time
from dataclasses import dataclass, field

import httpx2
import pytest
from live_server import wait_until
from scripted_engine import EOS

NUM_AGENTS, NUM_TURNS = 64, 10
SECONDS = float(os.environ.get("HYBRID_ENGINE_STRESS_SECONDS", "20"))


@dataclass
class Counts:
    """What the agents saw."""

    answers: int = 0
    left: int = 0
    refused: int = 0
    waited: int = 0
    gaps: list[float] = field(default_factory=list)


class Agent:
    """Talks for some turns, over and over; every answer must be its own codeword."""

    def __init__(self, number: int, http: httpx2.AsyncClient, counts: Counts) -> None:
        self.codeword = f"code{number:04}"
        self.http = http
        self.counts = counts
        self.random = random.Random(number)

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            messages = [{"role": "user", "content": self.codeword}]
            for turn in range(NUM_TURNS):
                if time.monotonic() >= end:
                    return
                text = await self.turn(messages)
                if text is None:
                    break
                messages += [{"role": "assistant", "content": text}, {"role": "user", "content": f"turn {turn}"}]

    async def turn(self, messages: list) -> str | None:
        """Return the answer; None when this turn was a rude one, or there was no place."""
        mood = self.random.random()
        if mood < 0.05:
            response = await self.http.post("/v1/chat/completions", content=b'{"messages": [')
            assert response.status_code == 400
            self.counts.refused += 1
            return None
        if mood < 0.1:
            response = await self.http.post("/v1/completions", json={"prompt": "x" * 5000})
            assert response.status_code in (400, 429)  # whoever comes when the queue is full is not even looked at
            self.counts.refused += 1
            return None
        body = {"messages": messages, "stream": True, "max_tokens": 60}
        async with self.http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                self.counts.waited += 1
                await asyncio.sleep(0.05)
                return None
            assert response.status_code == 200
            return await self.read(response, leaves=mood < 0.25, is_slow=mood > 0.95)

    async def read(self, response, *, leaves: bool, is_slow: bool) -> str | None:
        text, last = "", None
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            now = time.monotonic()
            if last is not None:
                self.counts.gaps.append(now - last)
            last = now
            if leaves and len(text) > 5:
                self.counts.left += 1
                return None
            if is_slow:
                await asyncio.sleep(0.02)
                last = None
        assert text == self.codeword * 3
        self.counts.answers += 1
        return text


@pytest.mark.slow
def test_agents_get_their_own_answers_and_leave_nothing_behind(serve):
    def script(request):
        return [*request.token_ids[6:14] * 3, EOS]

    # Steps that take as long as those of a small model: answers then come token by token, and the queue fills up.
    engine = {
        "num_blocks": 600,
        "max_num_seqs": 16,
        "max_model_len": 1024,
        "before_step": lambda plan: time.sleep(0.005),
    }
    server = serve(script, engine=engine, max_queue=20, has_access_log=False)
    num_files = len(os.listdir("/proc/self/fd"))
    counts = Counts()

    async def all_agents() -> None:
        limits = httpx2.Limits(max_connections=NUM_AGENTS)
        async with httpx2.AsyncClient(base_url=server.url, timeout=60, limits=limits) as http:
            end = time.monotonic() + SECONDS
            await asyncio.gather(*(Agent(number, http, counts).run(end) for number in range(NUM_AGENTS)))

    asyncio.run(all_agents())
    print(
        f"{counts.answers} answers, {counts.left} left, {counts.refused} refused, {counts.waited} told to wait; "
        f"gap p50 {sorted(counts.gaps)[len(counts.gaps) // 2] * 1e3:.1f} ms, "
        f"p99 {sorted(counts.gaps)[len(counts.gaps) * 99 // 100] * 1e3:.1f} ms"
    )
    assert min(counts.answers, counts.left, counts.refused, counts.waited) > 0
    wait_until(lambda: server.http.get("/cache").json()["num_answers_in_flight"] == 0)
    cache = server.http.get("/cache").json()
    assert cache["num_running"] == cache["num_waiting"] == 0
    assert [group["num_held"] for group in cache["groups"]] == [0, 0]
    assert server.service.engine._streams == {}
    assert len(os.listdir("/proc/self/fd")) <= num_files + 8
