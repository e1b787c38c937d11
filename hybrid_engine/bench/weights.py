"""Linear weights in 16 and in 8 bits: decode steps beside reading the weights once, and how well prose is predicted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median

import torch

from hybrid_engine import LLM, SamplingParams
from hybrid_engine.bench.prose import prose_tokens
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.demo import demo_checkpoint
from hybrid_engine.kernels.linear import QUANTIZATIONS, PackedLinear

KINDS = (None, *(kind for kind, device in QUANTIZATIONS.items() if device == "cpu"))
SHAPES = {"qkv": (1536, 640), "out": (640, 1024), "gate and up": (4096, 640), "down": (640, 2048)}
NUM_LAYERS, HEAD = 18, (262_144, 640)
"""Of Gemma 3 270M."""
PROMPT_TOKENS, NEW_TOKENS = 32, 16
BATCHES = (1, 16)
SKIPPED_TOKENS, WINDOW_TOKENS, WINDOW_STRIDE = 20_000, 512, 6_000
"""Of the prose: where the first window begins, its length, and from there to the next."""


def run(
    *, model: Path | None = None, num_rounds: int = 3, num_threads: int | None = None, num_windows: int = 4
) -> Iterator[Report]:
    """Time decode steps of a Gemma 3 270M with each kind of weights in turns, then let each predict a novel.

    model: another file with that model; None: the one of the demo extra.
    """
    torch.set_num_threads(num_threads or torch.get_num_threads())
    path = model or demo_checkpoint()
    llms = {
        kind: LLM(path, dtype="bfloat16", quantization=kind, cache_memory_bytes="256MiB", max_model_len=1024)
        for kind in KINDS
    }
    notes = (f"Gemma 3 270M, activations in bfloat16, {torch.get_num_threads()} threads",)
    yield Report("Decode steps by the weights' bits", tuple(_speeds(llms, num_rounds)), notes)
    yield Report("Perplexity by the weights' bits", tuple(_perplexities(llms, num_windows)), notes)


def _speeds(llms: dict[str | None, LLM], num_rounds: int) -> Iterator[Figure]:
    memories = {kind: _same_bytes(kind) for kind in llms}
    reads: dict[str | None, list[float]] = {kind: [] for kind in llms}
    steps: dict[tuple[str | None, int], list[float]] = {(kind, size): [] for kind in llms for size in BATCHES}
    for _ in range(num_rounds):
        for kind, llm in llms.items():
            reads[kind].append(_read_seconds(memories[kind]))
            for size in BATCHES:
                steps[kind, size].append(_step_seconds(llm, size))
    for kind, times in reads.items():
        yield Figure(f"reading {_name(kind)} weights once", "ms", tuple(1e3 * each for each in times))
    for (kind, size), times in steps.items():
        yield Figure(f"a step of {_name(kind)}, batch {size}", "ms", tuple(1e3 * each for each in times))
        ratios = tuple(step / read for step, read in zip(times, reads[kind], strict=True))
        yield Figure("  by the time of reading the weights once", "x", ratios)


def _same_bytes(kind: str | None) -> torch.Tensor:
    """Memory of as many bytes as the linear weights take."""
    shapes = [*SHAPES.values()] * NUM_LAYERS + [HEAD]
    packed = {shape: PackedLinear.pack(torch.zeros(shape).bfloat16(), kind) for shape in set(shapes)}
    return torch.ones(sum(packed[shape].num_bytes for shape in shapes) // 4)


def _read_seconds(memory: torch.Tensor) -> float:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        memory.sum()
        times.append(time.perf_counter() - start)
    return min(times)


def _step_seconds(llm: LLM, num_prompts: int) -> float:
    """The median time of a step in which so many requests decode."""
    prompts = [list(range(300 + 100 * i, 300 + 100 * i + PROMPT_TOKENS)) for i in range(num_prompts)]
    llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), progress=False)  # leaves prompts in the cache
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, progress=False)
    spans = []
    for output in outputs:
        total, first = output.metrics.total_seconds, output.metrics.ttft_seconds
        assert total is not None, output.metrics
        assert first is not None, output.metrics
        spans.append((total - first) / (NEW_TOKENS - 1))
    return median(spans)


def _perplexities(llms: dict[str | None, LLM], num_windows: int) -> Iterator[Figure]:
    tokenizer = llms[None].get_tokenizer()
    ids = prose_tokens(tokenizer)
    starts = range(SKIPPED_TOKENS, SKIPPED_TOKENS + num_windows * WINDOW_STRIDE, WINDOW_STRIDE)
    contexts = [([tokenizer.bos_token_id], [ids[start : start + WINDOW_TOKENS - 1]]) for start in starts]
    found = {}
    for kind, llm in llms.items():
        scores = llm.score_batch(contexts, progress=False)
        found[kind] = [math.exp(-fmean(score.logprobs)) for (score,) in scores]
    for kind, values in found.items():
        yield Figure(f"{_name(kind)}, a window of {WINDOW_TOKENS} tokens", "", tuple(values))
        ratios = tuple(value / whole for value, whole in zip(values, found[None], strict=True))
        yield Figure("  by that of bfloat16", "x", ratios)


def _name(kind: str | None) -> str:
    return kind or "bfloat16"
