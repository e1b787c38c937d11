"""What a long session costs when it comes again after the caches have given it up: from host memory, from disk."""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.demo import demo_checkpoint
from hybrid_engine.errors import CapacityError
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

SESSION_TOKENS = 8000
MAX_MODEL_LEN = SESSION_TOKENS + 64
FIRST_TOKEN_ID, END_TOKEN_ID = 1_000, 200_000
"""Prompts are drawn from here: no special tokens."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
HOST_BYTES = "2GiB"


def run(*, model: Path | None = None, num_rounds: int = 3, num_threads: int | None = None) -> Iterator[Report]:
    """Compare the time to the first token of a session that is new, and of one that was evicted.

    model: a GGUF file or a folder; None: the Gemma that the demo extra brings.
    """
    path = model or demo_checkpoint()
    memory_bytes = _memory_for_one_session(path)
    settings = {"max_model_len": MAX_MODEL_LEN, "cache_memory_bytes": memory_bytes, "max_num_seqs": 1}
    if num_threads is not None:
        settings["num_threads"] = num_threads
    note = f"sessions of {SESSION_TOKENS:,} tokens, cache memory {memory_bytes / 2**20:,.0f} MiB: it holds one of them"
    yield _host_report(path, settings, num_rounds, note)
    yield _disk_report(path, settings, num_rounds, note)


def _memory_for_one_session(path: Path) -> int:
    """Return the least memory, in steps of a tenth, that a session of this length runs in."""
    num_bytes = 1 << 20
    while True:
        try:
            LLM.plan(path, cache_memory_bytes=num_bytes, max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
        except CapacityError:
            num_bytes += num_bytes // 10
        else:
            return num_bytes


def _host_report(path: Path, settings: dict[str, Any], num_rounds: int, note: str) -> Report:
    """Sessions take turns, so that each has been evicted by the other when it comes again."""
    sessions = [_session(seed) for seed in range(2)]
    with LLM(path, **settings, host_cache_bytes=HOST_BYTES) as llm:
        llm.generate([_session(-1)[:300]], ONE_TOKEN, progress=False)
        cold = [_answer(llm, session) for session in sessions]
        again = [_answer(llm, sessions[index % 2]) for index in range(2 * num_rounds)]
        rates = _rates(llm)
    return _report("A session from host memory", cold, again, (note, rates))


def _disk_report(path: Path, settings: dict[str, Any], num_rounds: int, note: str) -> Report:
    """A new process finds what an earlier one has left."""
    session = _session(0)
    again = []
    with tempfile.TemporaryDirectory() as folder:
        with LLM(path, **settings, disk_cache=folder) as llm:
            llm.generate([_session(-1)[:300]], ONE_TOKEN, progress=False)
            cold = [_answer(llm, session)]
        num_bytes = sum(file.stat().st_size for file in Path(folder).rglob("*.safetensors"))
        for _ in range(num_rounds):
            with LLM(path, **settings, disk_cache=folder) as llm:
                llm.generate([_session(-1)[:300]], ONE_TOKEN, progress=False)
                again.append(_answer(llm, session))
                rates = _rates(llm)
    note = f"{note}; {num_bytes / 2**20:,.1f} MiB in files, likely in the system's page cache when read"
    return _report("A session from disk, after a restart", cold, again, (note, rates))


def _rates(llm: LLM) -> str:
    stats = llm.tier_stats()
    assert stats is not None, "no tier was asked for"
    rates = [f"{rate / 2**20:,.0f} MiB/s from {tier}" for tier, rate in stats.bytes_per_second.items()]
    if stats.tokens_per_second is not None:
        rates.append(f"{stats.tokens_per_second:,.0f} prompt tokens/s computed")
    return ", ".join(rates)


def _report(title: str, cold: list[RequestOutput], again: list[RequestOutput], notes: tuple[str, ...]) -> Report:
    seconds = [_ttft(output) for output in cold]
    fetched = [_ttft(output) for output in again]
    computed = tuple(float(_explained(output).num_computed) for output in again)
    reference = sum(seconds) / len(seconds)
    figures = (
        Figure("time to first token, new", "s", tuple(seconds)),
        Figure("time to first token, evicted before", "s", tuple(fetched)),
        Figure("ratio", "x", tuple(value / reference for value in fetched), at_most=0.3),
        Figure("prompt tokens computed again", "tokens", computed, at_most=16),
    )
    return Report(title, figures, (*notes, f"explained: {again[-1].cache}"))


def _answer(llm: LLM, prompt: list[int]) -> RequestOutput:
    (output,) = llm.generate([prompt], ONE_TOKEN, progress=False)
    return output


def _ttft(output: RequestOutput) -> float:
    seconds = output.metrics.ttft_seconds
    assert seconds is not None, "an answer without a first token"
    return seconds


def _explained(output: RequestOutput) -> Any:
    assert output.cache is not None, "an answer that was never scheduled"
    return output.cache


def _session(seed: int) -> list[int]:
    return random.Random(seed).choices(range(FIRST_TOKEN_ID, END_TOKEN_ID), k=SESSION_TOKENS)
