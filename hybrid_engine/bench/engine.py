"""How fast whole engines answer on real weights: same run, same threads, the peers taking turns."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

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
FIRST_TOKEN_ID, END_TOKEN_ID = 1_000, 200_000
"""Prompts are drawn from here: no special tokens."""


def run(
    *, model: Path | None = None, num_rounds: int = 3, num_threads: int | None = None, with_peers: bool = True
) -> Iterator[Report]:
    """Compare the engines with one request, and with eight at once.

    model: a GGUF file; None: the one that the demo extra brings. num_threads: None: as torch has it.
    Raises CheckpointError when that isn't installed.
    """
    gguf_file = model or demo_checkpoint()
    num_threads = num_threads or torch.get_num_threads()
    torch.set_num_threads(num_threads)
    ours = HybridEngine(gguf_file, num_threads=num_threads)
    generate, continuous, notes = _load_peers(gguf_file) if with_peers else (None, None, ())
    notes = (f"{PROMPT_TOKENS} prompt and {NEW_TOKENS} new tokens each, bfloat16, {num_threads} threads", *notes)
    for num_prompts, goal in ((1, 1.2), (NUM_CONCURRENT, 1.5)):
        # Continuous batching of a single request is no case that anybody runs.
        others = [peer for peer in (generate, continuous if num_prompts > 1 else None) if peer is not None]
        speeds = measure([ours, *others], num_prompts, num_rounds)
        title = f"Engine speed, {num_prompts} request{'s' if num_prompts > 1 else ''} at once"
        yield Report(title, (*_speed_figures(speeds), *_ratio_figures(speeds, goal)), notes)


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


def _ratio_figures(speeds: dict[str, list[float]], goal: float) -> list[Figure]:
    ours, *others = speeds.values()
    if not others:
        return []
    # The better of the others in the same round, so that a busy moment hits all of them alike.
    ratios = [mine / max(theirs) for mine, *theirs in zip(ours, *others, strict=True)]
    return [Figure("ratio to the better of the others", "x", tuple(ratios), at_least=goal)]


def _load_peers(gguf_file: Path) -> tuple[Peer | None, Peer | None, tuple[str, ...]]:
    try:
        model = load_transformers_model(gguf_file)
    except ImportError as error:
        return None, None, (f"NOT COMPARED: transformers can't load GGUF here: {error}",)
    return TransformersGenerate(model), TransformersContinuousBatching(model), ()
