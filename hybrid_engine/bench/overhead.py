"""What HTTP costs: the same prompts through `LLM.generate` and through a server of the same model, in turns."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hybrid_engine import LLM, SamplingParams, tiny_hybrid
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.bench.serving.client import COMPLETIONS, Ask
from hybrid_engine.bench.serving.drive import DriveSettings, connect, drive
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
    direct, served, waited, processor = [], [], [], []
    with _server(str(model)) as (url, process_id):
        _through_server(url, 0)
        _direct(llm, 0)
        for number in range(1, num_rounds + 1):
            if number % 2:
                direct.append(_direct(llm, number))
            before = _processor_seconds(process_id)
            speed, ttft = _through_server(url, number)
            processor.append((_processor_seconds(process_id) - before) / (NUM_WAVES * CONCURRENCY * NUM_TOKENS) * 1e6)
            served.append(speed)
            waited.append(ttft)
            if number % 2 == 0:
                direct.append(_direct(llm, number))
    ratios = tuple(through / alone for through, alone in zip(served, direct, strict=True))
    yield Report(
        f"A server beside the Python API, {CONCURRENCY} streams of {NUM_TOKENS} tokens at once",
        (
            Figure("LLM.generate", "tokens/s", tuple(direct)),
            Figure("over HTTP, streamed", "tokens/s", tuple(served)),
            Figure("HTTP by LLM.generate", "times", ratios, at_least=0.9),
            Figure("mean time to the first token over HTTP", "ms", tuple(waited)),
            Figure("processor time of the server's process", "us a token", tuple(processor)),
        ),
        (
            f"{Path(model).name}, float32; each round has prompts of its own, {NUM_WAVES * CONCURRENCY} of them",
            "the client runs on the same machine, in a process of its own",
        ),
    )


def _prompts(number: int) -> list[str]:
    return [f"round {number}, prompt {index} of them" for index in range(NUM_WAVES * CONCURRENCY)]


def _direct(llm: LLM, number: int) -> float:
    """Return tokens a second; as over HTTP, so many at once."""
    prompts, sampling = _prompts(number), SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    start = time.perf_counter()
    for first in range(0, len(prompts), CONCURRENCY):
        llm.generate(prompts[first : first + CONCURRENCY], sampling, progress=False)
    return len(prompts) * NUM_TOKENS / (time.perf_counter() - start)


def _through_server(url: str, number: int) -> tuple[float, float]:
    """Return tokens a second, and the mean time to the first token in milliseconds."""
    body = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    sessions = [[Ask(COMPLETIONS, {"prompt": prompt} | body)] for prompt in _prompts(number)]

    async def measure() -> tuple[float, float]:
        async with connect(url, model=None, api_key=None, timeout_seconds=600) as server:
            done = await drive(server, sessions, DriveSettings(concurrency=CONCURRENCY))
        for answer in done.answers:
            if answer.error is not None:
                raise ConfigError(f"the server didn't answer: {answer.error}")
        tokens = sum(answer.num_answer_tokens for answer in done.answers)
        return tokens / done.seconds, sum(answer.ttft for answer in done.answers) / len(done.answers) * 1000

    return asyncio.run(measure())


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
