"""What steps cost beside their floors: decoding beside reading the weights, prefill beside its linear layers alone."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

from hybrid_engine.bench.prose import prose_tokens
from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.demo import demo_checkpoint
from hybrid_engine.kernels.linear import PackedLinear, linear
from hybrid_engine.runner.model_runner import ModelRunner
from hybrid_engine.sampling_params import SamplingParams
from hybrid_engine.startup import make_config, start_engine

DECODE_GOALS = {1: 1.35, 16: 2.0}
"""By batch size: a step's time at most, in times of reading the weights once."""
PREFILL_TOKENS = 2048
TRIES = 2
"""Of a prefill and of each layer by itself: the first one warms, and a busy moment hits only one."""
LEAST_PREFILL_SHARE = 0.5
"""Of the rate of the linear layers alone."""
PROMPT_TOKENS, DECODE_STEPS = 512, 16


def run(
    *,
    model: Path | None = None,
    num_rounds: int = 5,
    num_threads: int | None = None,
    quantization: str | None = None,
    prompt_tokens: int = PROMPT_TOKENS,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Iterator[Report]:
    """Time whole engine steps (scheduling and sampling included) and their floors in turns.

    model: a checkpoint; None: the one that the demo extra brings. Raises CheckpointError when that isn't installed.
    quantization: of the weights; floors are then those of the bytes held, and goals, set for bfloat16, are left out.
    """
    num_threads = num_threads or torch.get_num_threads()
    torch.set_num_threads(num_threads)
    bench = StepBench(model or demo_checkpoint(), num_threads, quantization)
    bench.decode(1, prompt_tokens)  # what is built on first use
    yield _decoding(bench, num_rounds, prompt_tokens)
    yield _prefill(bench, num_rounds, prefill_tokens)


class StepBench:
    """An engine on real weights, and the times of its steps and of their floors."""

    def __init__(self, model: Path, num_threads: int, quantization: str | None = None) -> None:
        config = make_config(
            model,
            dtype="bfloat16",
            quantization=quantization,
            num_threads=num_threads,
            max_num_batched_tokens=8192,
        )
        self.has_goals = quantization is None
        self.setting = setting(quantization, num_threads)
        self._engine, _ = start_engine(config)
        runner = self._engine.runner
        assert isinstance(runner, ModelRunner), runner
        self.weights = packed_weights(runner.model)
        self.weight_bytes = sum(packed.num_bytes for packed in self.weights)
        self._same_bytes = torch.zeros(self.weight_bytes // 8, dtype=torch.int64)
        self._ids = map(str, itertools.count())
        self._prose = prose_tokens(self._engine.tokenizer)

    def read(self) -> float:
        """Return the seconds that reading as many bytes as the weights have takes: a sum, on all threads."""
        start = time.perf_counter()
        self._same_bytes.sum()
        return time.perf_counter() - start

    def decode(self, num_requests: int, prompt_tokens: int, *, temperature: float = 0) -> float:
        """Return the median seconds of a step in which so many requests get a token each."""
        steps = self._steps(num_requests, prompt_tokens, DECODE_STEPS, temperature)
        return median(steps[-DECODE_STEPS + 1 :])

    def prefill(self, num_tokens: int) -> float:
        """Return the seconds from a prompt to its first token."""
        return sum(self._steps(1, num_tokens, 1))

    def _steps(self, num_requests: int, prompt_tokens: int, num_new_tokens: int, temperature: float = 0) -> list[float]:
        self._engine.reset_prefix_cache()
        sampling = SamplingParams(temperature=temperature, max_tokens=num_new_tokens, ignore_eos=True)
        for request_id in itertools.islice(self._ids, num_requests):
            first = random.Random(request_id).randrange(len(self._prose) - prompt_tokens)
            prompt = self._prose[first : first + prompt_tokens]
            self._engine.add_request(request_id, prompt, sampling)
        seconds = []
        while self._engine.has_unfinished_requests():
            start = time.perf_counter()
            self._engine.step()
            seconds.append(time.perf_counter() - start)
        return seconds

    @torch.inference_mode()
    def linear_layers(self, num_tokens: int) -> float:
        """Return the seconds that all linear layers take by themselves, the head for one token.

        Each by the engine's kernel or by torch's on the weight in bfloat16, whichever is faster.
        """
        return sum(_fastest(packed, 1 if packed is self.weights[0] else num_tokens) for packed in self.weights)


def setting(quantization: str | None, num_threads: int) -> str:
    """Return in what an engine computes, for notes."""
    weights = "" if quantization is None else f", weights in {quantization}"
    return f"bfloat16{weights}, {num_threads} threads"


def packed_weights(model: nn.Module) -> list[PackedLinear]:
    """Return the weights of all linear layers and of the head, that one first, each once."""
    found = [value for module in model.modules() for value in vars(module).values() if isinstance(value, PackedLinear)]
    return sorted({id(packed): packed for packed in found}.values(), key=lambda packed: -packed.num_outputs)


def _fastest(packed: PackedLinear, num_tokens: int) -> float:
    x_TK = torch.randn(num_tokens, packed.num_inputs).to(packed.dtype)
    weight_NK = packed.weight_NK()
    seconds = []
    for operation in (lambda: linear(x_TK, packed), lambda: F.linear(x_TK, weight_NK)):
        for _ in range(TRIES):
            start = time.perf_counter()
            operation()
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def _decoding(bench: StepBench, num_rounds: int, prompt_tokens: int) -> Report:
    ways = [(size, temperature) for size in DECODE_GOALS for temperature in (0, 1)]
    rounds = [
        (bench.read(), {way: bench.decode(way[0], prompt_tokens, temperature=way[1]) for way in ways}, bench.read())
        for _ in range(num_rounds)
    ]
    # Memory is as fast as the neighbours let it be: before and behind the steps.
    reads = [(before + after) / 2 for before, _, after in rounds]
    bandwidth = tuple(bench.weight_bytes / read / 1e9 for read in reads)
    figures = [Figure(f"reading {bench.weight_bytes / 1e6:.0f} MB of weights once", "GB/s", bandwidth)]
    for size, temperature in ways:
        steps = [steps[size, temperature] for _, steps, _ in rounds]
        name = f"decode step, batch {size}" + (", sampled" if temperature else "")
        figures.append(Figure(name, "ms", tuple(step * 1e3 for step in steps)))
        ratios = tuple(step / read for step, read in zip(steps, reads, strict=True))
        goal = DECODE_GOALS[size] if bench.has_goals and not temperature else None
        figures.append(Figure("  by the time of reading", "x", ratios, at_most=goal))
    notes = (
        f"{bench.setting}, prompts of {prompt_tokens} tokens of a novel; scheduling and sampling count",
        "sampled: temperature 1, where every logit counts; else greedy",
        f"a step: the median of {DECODE_STEPS - 1}; reading: the sum of as many bytes, before and behind the steps",
    )
    return Report("Decode steps beside reading the weights", tuple(figures), notes)


def _prefill(bench: StepBench, num_rounds: int, num_tokens: int) -> Report:
    rounds = [
        (min(bench.prefill(num_tokens) for _ in range(TRIES)), bench.linear_layers(num_tokens))
        for _ in range(num_rounds)
    ]
    flops = 2 * sum(p.num_inputs * p.num_outputs * num_tokens for p in bench.weights[1:])
    flops += 2 * bench.weights[0].num_inputs * bench.weights[0].num_outputs
    figures = (
        Figure(f"prefill of {num_tokens:,} tokens", "GFLOP/s", tuple(flops / whole / 1e9 for whole, _ in rounds)),
        Figure("  its linear layers alone", "GFLOP/s", tuple(flops / layers / 1e9 for _, layers in rounds)),
        Figure(
            "  share of their rate",
            "x",
            tuple(layers / whole for whole, layers in rounds),
            at_least=LEAST_PREFILL_SHARE if bench.has_goals else None,
        ),
    )
    notes = (
        f"{bench.setting}; FLOP of linear layers only, the head's for the last token only",
        "alone: each layer by the engine's kernel or by torch's in bfloat16, whichever is faster",
        f"the whole and each layer: the best of {TRIES}",
    )
    return Report("Prefill beside its linear layers", figures, notes)
