"""What HTTP costs: the same prompts through `LLM.generate` and through a server of the same model, in turns."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybrid_engine import LLM, SamplingParams, tiny_hybrid
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.bench.serving.client import COMPLETIONS, Ask
from hybrid_engine.bench.serving.drive import Drive, DriveSettings, connect, drive
from hybrid_engine.errors import ConfigError

CONCURRENCY = 16
NUM_TOKENS = 200
"""Of each answer."""
NUM_WAVES = 2
"""Times that all streams are answered in one round."""
START_SECONDS = 180
MEMORY = "64MiB"


def run(*, model: str | Path = tiny_hybrid.NAME, num_rounds: int = 5) -> Iterator[Report]:
    """Measure in turns; the ratio is taken of each round, so that a busy moment of the machine touches both."""
    llm = LLM(model, cache_memory_bytes=MEMORY, dtype="float32")
    direct: list[Round] = []
    served: list[Round] = []
    with _server(str(model)) as (url, process_id):
        _through_server(url, process_id, 0)
        _direct(llm, 0)
        for number in range(1, num_rounds + 1):
            # Each goes first in every other round, so that a busy moment of the machine favours neither.
            if number % 2:
                direct.append(_direct(llm, number))
            served.append(_through_server(url, process_id, number))
            if number % 2 == 0:
                direct.append(_direct(llm, number))
    yield Report(
        f"A server beside the Python API, {CONCURRENCY} streams of {NUM_TOKENS} tokens at once",
        (
            Figure("LLM.generate", "tokens/s", tuple(each.speed for each in direct)),
            Figure("over HTTP, streamed", "tokens/s", tuple(each.speed for each in served)),
            _ratio("HTTP by LLM.generate, tokens/s", [each.speed for each in served], [each.speed for each in direct]),
            Figure("processor time of LLM.generate", "us a token", tuple(each.processor_us for each in direct)),
            Figure("processor time of the server", "us a token", tuple(each.processor_us for each in served)),
            _ratio(
                "HTTP by LLM.generate, tokens per processor second",
                [each.processor_us for each in direct],
                [each.processor_us for each in served],
            ),
            Figure("mean time to the first token over HTTP", "ms", tuple(each.ttft_ms for each in served)),
        ),
        (
            f"{Path(model).name}, float32; each round has prompts of its own, {NUM_WAVES * CONCURRENCY} of them",
            "the client runs on the same machine, in a process of its own; its processor time is in the tokens/s only",
        ),
    )


@dataclass(frozen=True)
class Round:
    """One wave of prompts after the other, answered."""

    speed: float
    """Tokens a second."""
    processor_us: float
    """Processor time of the process that computes, for each token."""
    ttft_ms: float = 0.0


def _ratio(name: str, over: Sequence[float], under: Sequence[float]) -> Figure:
    return Figure(name, "times", tuple(a / b for a, b in zip(over, under, strict=True)), at_least=0.9)


def _prompts(number: int) -> list[str]:
    return [f"round {number}, prompt {index} of them" for index in range(NUM_WAVES * CONCURRENCY)]


def _direct(llm: LLM, number: int) -> Round:
    """Answer prompts in this process; as over HTTP, so many at once."""
    prompts, sampling = _prompts(number), SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    start, processor = time.perf_counter(), time.process_time()
    for first in range(0, len(prompts), CONCURRENCY):
        llm.generate(prompts[first : first + CONCURRENCY], sampling, progress=False)
    num_tokens = len(prompts) * NUM_TOKENS
    return Round(num_tokens / (time.perf_counter() - start), (time.process_time() - processor) / num_tokens * 1e6)


def _through_server(url: str, process_id: int, number: int) -> Round:
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    sessions = [[Ask(COMPLETIONS, {"prompt": prompt} | body)] for prompt in _prompts(number)]

    async def measure() -> Drive:
        async with connect(url, model=None, api_key=None, timeout_seconds=600) as server:
            return await drive(server, sessions, DriveSettings(concurrency=CONCURRENCY))

    before = _processor_seconds(process_id)
    done = asyncio.run(measure())
    for answer in done.answers:
        if answer.error is not None:
            raise ConfigError(f"the server didn't answer: {answer.error}")
    num_tokens = sum(answer.num_answer_tokens for answer in done.answers)
    return Round(
        num_tokens / done.seconds,
        (_processor_seconds(process_id) - before) / num_tokens * 1e6,
        sum(answer.ttft for answer in done.answers) / len(done.answers) * 1000,
    )


@contextmanager
def _server(model: str) -> Iterator[tuple[str, int]]:
    """Start a server in a process of its own and end it; gives its address and its process id."""
    command = [sys.executable, "-m", "hybrid_engine.cli", "serve", model, "--port", "0", "--memory", MEMORY]
    command += ["--dtype", "float32", "--no-access-log"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                yield found[1], process.pid
                return
        raise ConfigError(f"the server did not start: {''.join(lines[-5:])}")
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _processor_seconds(process_id: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
