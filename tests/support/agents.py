"""Agents that talk with a server of the tiny hybrid, some of them rude; each has a code that nobody can guess.

The model was trained to recall what it was told: an answer without the agent's own code is one that went wrong.
"""

import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import httpx2

NUM_TURNS = 10
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
CHAT = "/v1/chat/completions"


@dataclass
class Counts:
    """What all agents together saw."""

    answers: int = 0
    left: int = 0
    refused: int = 0
    waited: int = 0
    late: int = 0
    cut: int = 0
    """Streams that ended without an end, since the server is gone."""
    misremembered: int = 0
    """Wrong answers that the model also gives when it computes everything."""
    wrong: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def gap(self, percent: int) -> float:
        """A percentile of the seconds between news."""
        return sorted(self.gaps)[len(self.gaps) * percent // 100] if self.gaps else 0.0


class Agent:
    """Talks for some turns, over and over; every answer must have its own code."""

    def __init__(self, number: int, http: httpx2.AsyncClient, counts: Counts, *, is_rude: bool = True) -> None:
        self.number = number
        self.http = http
        self.counts = counts
        self.random = random.Random(number)
        self.is_rude = is_rude

    def begin(self) -> None:
        """Begin a conversation about somebody new."""
        letters = [self.random.choice(kind) for _ in range(3) for kind in (CONSONANTS, VOWELS)]
        name = "".join(letters).capitalize()
        # Codes of different agents never meet.
        self.code = f"{1000 + self.number * 128 + self.random.randrange(128)}"
        self.messages = [{"role": "system", "content": f" The code of {name} is {self.code}."}]
        self.question = {"role": "user", "content": f"What is the code of {name}?"}

    async def run(self, end: float) -> None:
        """Talk until the time is over."""
        while time.monotonic() < end:
            self.begin()
            for _ in range(NUM_TURNS):
                if time.monotonic() >= end or not await self.turn():
                    break

    async def turn(self) -> bool:
        """Ask once; return whether the conversation can go on."""
        mood = self.random.random() if self.is_rude else 0.5
        if mood < 0.08:
            return await self._ask_nonsense()
        if mood < 0.11:
            return await self._leave_before_the_answer()
        body = {"messages": [*self.messages, self.question], "stream": True, "max_tokens": 12, "temperature": 0}
        if mood < 0.14:
            body["timeout_seconds"] = 0.02
        async with self.http.stream("POST", CHAT, json=body) as response:
            if response.status_code == 429:
                assert int(response.headers["retry-after"]) >= 1
                self.counts.waited += 1
                await asyncio.sleep(0.1)
                return True
            assert response.status_code == 200, await response.aread()
            return await self._read(response, leaves=0.14 <= mood < 0.25, is_slow=mood > 0.95)

    async def _ask_nonsense(self) -> bool:
        content, statuses = self.random.choice(
            (
                ('{"messages": [', {400}),
                ('{"messages": "hi"}', {400}),
                ('{"messages": [], "colour": 1}', {400}),
                (json.dumps({"messages": self.messages, "temperature": -1}), {400}),
                (json.dumps({"messages": [{"role": "user", "content": "word " * 20_000}]}), {400, 429}),
            )
        )
        response = await self.http.post(CHAT, content=content, headers={"content-type": "application/json"})
        assert response.status_code in statuses, response.text
        self.counts.refused += 1
        return True

    async def _leave_before_the_answer(self) -> bool:
        body = {"messages": [*self.messages, self.question], "max_tokens": 200, "ignore_eos": True}
        try:
            await self.http.post(CHAT, json=body, timeout=self.random.uniform(0.01, 0.2))
        except httpx2.TimeoutException:
            self.counts.left += 1
        return True

    async def _read(self, response: httpx2.Response, *, leaves: bool, is_slow: bool) -> bool:
        text, last, is_whole = "", None, False
        async for line in response.aiter_lines():
            is_whole = is_whole or line == "data: [DONE]"
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                assert chunk["error"]["code"] == "deadline_exceeded", chunk
                self.counts.late += 1
                return True
            text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
            now = time.monotonic()
            if last is not None:
                self.counts.gaps.append(now - last)
            last = now
            if leaves and text:
                self.counts.left += 1
                return False
            if is_slow:
                await asyncio.sleep(0.02)
                last = None
        if not is_whole:
            self.counts.cut += 1
            return False
        self.counts.answers += 1
        if self.code not in text:
            await self._look_into(text)
        self.messages += [self.question, {"role": "assistant", "content": text}]
        return True

    async def _look_into(self, text: str) -> None:
        """Ask once more, nothing found in the cache: it is the cache's fault unless the model says the same again."""
        body = {"messages": [*self.messages, self.question], "max_tokens": 12, "temperature": 0}
        while True:
            response = await self.http.post(CHAT, json=body | {"skip_reading_prefix_cache": True})
            if response.status_code != 429:
                break
            await asyncio.sleep(0.5)  # the others keep the queue full: who isn't answered yet knows nothing yet
        again = response.json()["choices"][0]["message"]["content"] if response.status_code == 200 else None
        if again == text:
            self.counts.misremembered += 1
        else:
            self.counts.wrong.append(f"{text!r} instead of {self.code}; {again!r} without the cache")


async def run_agents(url: str, num_agents: int, seconds: float, *, is_rude: bool = True) -> Counts:
    """Let agents talk for a while, and return what they saw."""
    counts = Counts()
    limits = httpx2.Limits(max_connections=num_agents)
    async with httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as http:
        end = time.monotonic() + seconds
        agents = [Agent(number, http, counts, is_rude=is_rude) for number in range(num_agents)]
        await asyncio.gather(*(agent.run(end) for agent in agents))
    return counts
