"""How fast whole engines answer on real weights: same run, same threads, the peers taking turns."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from hybrid_engine.bench import steps
from hybrid_engine.bench.llama_cpp import LlamaCpp
from hybrid_engine.bench.peers import (
    HybridEngine,
    Peer,
    TokenIds,
    TransformersContinuousBatching,
    TransformersGenerate,
    load_transformers_model,
)
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.demo import demo_checkpoint

PROMPT_TOKENS = 512
NEW_TOKENS = 64
NUM_CONCURRENT = 8
GOALS = {
    TransformersGenerate.name: {1: 2.0, NUM_CONCURRENT: 1.8},
    LlamaCpp.name: {1: 1.0, NUM_CONCURRENT: 2.0},
}
"""How many times as fast as a peer this engine should be, by the number of requests at once."""
FIRST_TOKEN_ID, END_TOKEN_ID = 1_000, 200_000
"""Prompts are drawn from here: no special tokens."""


def run(
    *,
    model: Path | None = None,
    num_rounds: int = 3,
    num_threads: int | None = None,
    quantization: str | None = None,
    with_peers: bool = True,
    llama_cpp_file: Path | None = None,
) -> Iterator[Report]:
    """Time steps beside their floors, then compare the engines with one request, and with eight at once.

    model: a GGUF file; None: the one that the demo extra brings. num_threads: None: as torch has it.
    quantization: of this engine's weights. with_peers: transformers too, in bfloat16 always.
    llama_cpp_file: llama.cpp too, on this GGUF file of the same model.
    Raises CheckpointError when a model isn't there, ConfigError when llama.cpp isn't: before any timing.
    """
    gguf_file = model or demo_checkpoint()
    num_threads = num_threads or torch.get_num_threads()
    llama_cpp = None if llama_cpp_file is None else _load_llama_cpp(llama_cpp_file, num_threads)
    yield from steps.run(model=gguf_file, num_rounds=num_rounds, num_threads=num_threads, quantization=quantization)
    ours = HybridEngine(gguf_file, num_threads=num_threads, quantization=quantization)
    notes = [f"{PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens each; {steps.setting(quantization, num_threads)}"]
    generate, continuous = _load_transformers(gguf_file, notes) if with_peers else (None, None)
    if llama_cpp_file is not None and llama_cpp is not None:
        notes.append(f"llama.cpp: {llama_cpp_file.name}, {llama_cpp.facts}")
    for num_prompts in (1, NUM_CONCURRENT):
        # Continuous batching of a single request is no case that anybody runs.
        others = [generate, continuous if num_prompts > 1 else None, llama_cpp]
        speeds = measure([ours, *(peer for peer in others if peer is not None)], num_prompts, num_rounds)
        title = f"Engine speed, {num_prompts} request{'s' if num_prompts > 1 else ''} at once"
        goals = goals_of(num_prompts, quantization)
        yield Report(title, (*_speed_figures(speeds), *_ratio_figures(speeds, goals)), tuple(notes))


def goals_of(num_prompts: int, quantization: str | None) -> dict[str, float]:
    """Return how many times as fast as each peer this engine should be; beside transformers only in the same bits."""
    return {name: goals[num_prompts] for name, goals in GOALS.items() if quantization is None or name == LlamaCpp.name}


def measure(peers: Sequence[Peer], num_prompts: int, num_rounds: int) -> dict[str, list[float]]:
    """Return new tokens per second of each peer, one for each round; the peers take turns in every round."""
    for peer in peers:
        peer.generate(_prompts(num_prompts, seed=-1), 4)  # what is built on first use
    speeds: dict[str, list[float]] = {peer.name: [] for peer in peers}
    for round_index in range(num_rounds):
        prompts = _prompts(num_prompts, seed=round_index)
        for peer in peers:
            speeds[peer.name].append(_speed(peer, prompts))
    return speeds


def _speed(peer: Peer, prompts: list[TokenIds]) -> float:
    start = time.perf_counter()
    answers = peer.generate(prompts, NEW_TOKENS)
    seconds = time.perf_counter() - start
    lengths = [len(answer) for answer in answers]
    assert lengths == [NEW_TOKENS] * len(prompts), f"{peer.name} generated {lengths} tokens, not {NEW_TOKENS} each"
    return len(prompts) * NEW_TOKENS / seconds


def _prompts(num_prompts: int, *, seed: int) -> list[TokenIds]:
    draw = random.Random(seed)
    return [draw.choices(range(FIRST_TOKEN_ID, END_TOKEN_ID), k=PROMPT_TOKENS) for _ in range(num_prompts)]


def _speed_figures(speeds: dict[str, list[float]]) -> list[Figure]:
    return [Figure(name, "new tokens/s", tuple(values)) for name, values in speeds.items()]


def _ratio_figures(speeds: Mapping[str, Sequence[float]], goals: Mapping[str, float]) -> list[Figure]:
    """Of each round: a busy moment hits all engines of it alike."""
    ours, *others = speeds.items()
    return [
        Figure(
            f"ratio to {name}",
            "x",
            tuple(mine / other for mine, other in zip(ours[1], theirs, strict=True)),
            at_least=goals.get(name),
        )
        for name, theirs in others
    ]


def _load_llama_cpp(gguf_file: Path, num_threads: int) -> LlamaCpp:
    num_tokens = PROMPT_TOKENS + NEW_TOKENS
    return LlamaCpp(gguf_file, num_threads=num_threads, num_requests=NUM_CONCURRENT, num_tokens=num_tokens)


def _load_transformers(gguf_file: Path, notes: list[str]) -> tuple[Peer | None, Peer | None]:
    try:
        model = load_transformers_model(gguf_file)
    except ImportError as error:
        notes.append(f"NOT COMPARED: transformers can't load GGUF here: {error}")
        return None, None
    return TransformersGenerate(model), TransformersContinuousBatching(model)
