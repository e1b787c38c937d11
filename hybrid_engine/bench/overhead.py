"""What HTTP costs: the same prompts through `LLM.generate` and through a server of the same model, in turns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine import LLM, SamplingParams, tiny_hybrid
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.bench.serving.client import COMPLETIONS
from hybrid_engine.bench.serving.light import ask_at_once
from hybrid_engine.errors import ConfigError

CONCURRENCY = 16
NUM_TOKENS = 200
"""Of each answer."""
NUM_ROUNDS = 40
"""Short ones: a neighbour that slows the machine down for seconds then touches all ways alike. And many: the ratio of
one is off by a tenth where neighbours are busy, the median by a fifth of that."""
START_SECONDS = 180
MEMORY = "64MiB"


def run(*, model: str | Path = tiny_hybrid.NAME, num_rounds: int = NUM_ROUNDS) -> Iterator[Report]:
    """Measure in turns; the ratio is taken of each round, so that a busy moment of the machine touches both."""
    llm = LLM(model, cache_memory_bytes=MEMORY, dtype="float32")
    direct: list[Round] = []
    streamed: list[Round] = []
    whole: list[Round] = []
    with _server(str(model)) as (url, process_id):
        ways = (
            (direct, lambda number: _direct(llm, number)),
            (streamed, lambda number: _through_server(url, process_id, number, stream=True)),
            (whole, lambda number: _through_server(url, process_id, number, stream=False)),
        )
        for _, measure in ways:
            measure(0)
        for number in range(1, num_rounds + 1):
            # The last comes first in every other round, so that a busy moment of the machine favours none.
            for rounds, measure in ways if number % 2 else reversed(ways):
                rounds.append(measure(number))
    yield Report(
        f"A server beside the Python API, {CONCURRENCY} streams of {NUM_TOKENS} tokens at once",
        (
            Figure("LLM.generate", "tokens/s", tuple(each.speed for each in direct)),
            Figure("over HTTP, streamed", "tokens/s", tuple(each.speed for each in streamed)),
            Figure("over HTTP, not streamed", "tokens/s", tuple(each.speed for each in whole)),
            _ratio(
                "streamed by LLM.generate, tokens/s",
                [each.speed for each in streamed],
                [each.speed for each in direct],
                at_least=0.9,
            ),
            _ratio(
                "not streamed by LLM.generate, tokens/s",
                [each.speed for each in whole],
                [each.speed for each in direct],
            ),
            Figure("processor time of LLM.generate", "us a token", tuple(each.processor_us for each in direct)),
            Figure(
                "processor time of the server, streamed", "us a token", tuple(each.processor_us for each in streamed)
            ),
            Figure("of it, its event loop", "us a token", tuple(each.loop_us for each in streamed)),
            Figure(
                "processor time of the server, not streamed", "us a token", tuple(each.processor_us for each in whole)
            ),
            _ratio(
                "streamed by LLM.generate, tokens per processor second",
                [each.processor_us for each in direct],
                [each.processor_us for each in streamed],
                at_least=0.9,
            ),
            Figure("processor time of the client, streamed", "us a token", tuple(each.client_us for each in streamed)),
            Figure("mean time to the first token, streamed", "ms", tuple(each.ttft_ms for each in streamed)),
        ),
        (
            f"{Path(model).name}, float32; each round has prompts of its own",
            "the client runs on the same machine, in a process of its own, and reads without parsing: its processor "
            "time is in the tokens/s only",
        ),
    )


@dataclass(frozen=True)
class Round:
    """All prompts of one round, answered at once."""

    speed: float
    """Tokens a second."""
    processor_us: float
    """Processor time of the process that computes, for each token."""
    loop_us: float = 0.0
    """Of it, that of the process's first thread: over HTTP the one that has the event loop."""
    client_us: float = 0.0
    ttft_ms: float = 0.0


def _ratio(name: str, over: Sequence[float], under: Sequence[float], *, at_least: float | None = None) -> Figure:
    return Figure(name, "times", tuple(a / b for a, b in zip(over, under, strict=True)), at_least=at_least)


def _prompts(number: int) -> list[str]:
    return [f"round {number}, prompt {index} of them" for index in range(CONCURRENCY)]


def _direct(llm: LLM, number: int) -> Round:
    """Answer the prompts in this process."""
    prompts, sampling = _prompts(number), SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)
    start, processor = time.perf_counter(), time.process_time()
    llm.generate(prompts, sampling, progress=False)
    num_tokens = len(prompts) * NUM_TOKENS
    return Round(num_tokens / (time.perf_counter() - start), (time.process_time() - processor) / num_tokens * 1e6)


def _through_server(url: str, process_id: int, number: int, *, stream: bool) -> Round:
    body: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "stream": stream}
    if stream:
        body |= {"stream_options": {"include_usage": True}}
    bodies = [body | {"prompt": prompt} for prompt in _prompts(number)]
    before, loop_before, client_before = *_processor_seconds(process_id), time.process_time()
    start = time.perf_counter()
    answers = ask_at_once(url, COMPLETIONS, bodies)
    seconds, client = time.perf_counter() - start, time.process_time() - client_before
    after, loop_after = _processor_seconds(process_id)
    num_tokens = sum(answer.num_tokens() for answer in answers)
    return Round(
        num_tokens / seconds,
        (after - before) / num_tokens * 1e6,
        (loop_after - loop_before) / num_tokens * 1e6,
        client / num_tokens * 1e6,
        sum(answer.ttft for answer in answers) / len(answers) * 1000 if stream else 0.0,
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


def _processor_seconds(process_id: int) -> tuple[float, float]:
    """Return the processor time that a process has used, and that of its first thread."""
    return _ticks(Path(f"/proc/{process_id}/stat")), _ticks(Path(f"/proc/{process_id}/task/{process_id}/stat"))


def _ticks(stat: Path) -> float:
    fields = stat.read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
