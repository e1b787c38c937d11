"""The scans of recurrent layers in published shapes: beside the same in torch, and what states kept on the way cost."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.kernels import ssm
from hybrid_engine.kernels.ssm import StateMeta, fallback, fallback_delta

NUM_TOKENS = 512
CAPTURE_ENDS = (100, 256, 400)
"""Tokens behind which a state is kept on the way; the last one is kept anyhow."""
NUM_SLOTS = 2 + len(CAPTURE_ENDS)
MOST_CAPTURE_RATIO = 1.25
LEAST_LOOP_RATIO = 20.0
CALLS_IN_ROUND = 5


@dataclass(frozen=True)
class Scan:
    """A scan with its inputs."""

    name: str
    ours: Callable[..., Tensor]
    torchs: Callable[..., Tensor]
    """The same in torch alone."""
    operands: Mapping[str, Any]
    state_name: str
    state_shape: tuple[int, ...]
    peer: Callable[..., tuple[Tensor, Tensor]] | None = None
    """transformers' loop over tokens, with the same inputs, from states of zero: outputs and the last states."""


def run(*, num_rounds: int = 3, num_threads: int | None = None, num_tokens: int = NUM_TOKENS) -> Iterator[Report]:
    """Time each scan with and without states kept on the way, and torch's counterpart, in turns."""
    torch.set_num_threads(num_threads or torch.get_num_threads())
    torch.manual_seed(0)
    figures: list[Figure] = []
    with torch.inference_mode():
        for scan in (mamba1(num_tokens), mamba2(num_tokens), delta_rule(num_tokens)):
            figures += _figures(scan, num_tokens, num_rounds)
    notes = (
        f"bfloat16 inputs, float32 states, one request of {num_tokens} tokens, {torch.get_num_threads()} threads",
        f"{len(CAPTURE_ENDS)} states are kept on the way",
        "torch: our own fallback, Mamba-1 a loop over tokens that allocates little, the others in pieces",
    )
    yield Report("Scans of recurrent layers", tuple(figures), notes)


def mamba1(num_tokens: int, *, channels: int = 8192, num_states: int = 16) -> Scan:
    """Jamba 1.5's."""
    operands = {
        "x_TI": _random(num_tokens, channels),
        "dt_TI": _random(num_tokens, channels),
        "z_TI": _random(num_tokens, channels),
        "B_TN": _random(num_tokens, num_states),
        "C_TN": _random(num_tokens, num_states),
        "A_IN": -torch.rand(channels, num_states),
        "D_I": torch.randn(channels),
        "dt_bias_I": torch.randn(channels) - 4,
    }
    return Scan(
        f"Mamba-1, {channels:,} channels of {num_states} states",
        ssm.mamba1_scan,
        fallback.mamba1_scan,
        operands,
        "state_SIN",
        (channels, num_states),
        _transformers_loop(operands),
    )


def _transformers_loop(inputs: Mapping[str, Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What transformers runs for Jamba where no kernel is installed: torch's part of its function, whatever is."""
    from transformers.models.jamba.modeling_jamba import mamba_selective_scan

    turned = {name: inputs[name].T[None] for name in ("x_TI", "dt_TI", "B_TN", "C_TN", "z_TI")}
    return partial(
        inspect.unwrap(mamba_selective_scan),
        turned["x_TI"],
        turned["dt_TI"],
        inputs["A_IN"],
        turned["B_TN"],
        turned["C_TN"],
        D=inputs["D_I"],
        z=turned["z_TI"],
        delta_bias=inputs["dt_bias_I"],
        delta_softplus=True,
        return_last_state=True,
    )


def mamba2(num_tokens: int, *, heads: int = 128, head_size: int = 64, num_states: int = 128) -> Scan:
    """Granite 4 H's."""
    operands = {
        "x_THD": _random(num_tokens, heads, head_size),
        "dt_TH": _random(num_tokens, heads),
        "B_TGN": _random(num_tokens, 1, num_states),
        "C_TGN": _random(num_tokens, 1, num_states),
        "A_H": -torch.rand(heads),
        "D_H": torch.randn(heads),
        "dt_bias_H": torch.randn(heads) - 4,
        "dt_limit": (0.0, math.inf),
        "chunk": ssm.PIECE_TOKENS,
    }
    return Scan(
        f"Mamba-2, {heads} heads of {head_size} x {num_states}",
        ssm.mamba2_scan,
        fallback.mamba2_scan,
        operands,
        "state_SHDN",
        (heads, head_size, num_states),
    )


def delta_rule(num_tokens: int, *, heads: int = 32, groups: int = 16, size: int = 128) -> Scan:
    """Qwen 3 Next's."""
    operands = {
        "q_TGN": _random(num_tokens, groups, size),
        "k_TGN": _random(num_tokens, groups, size),
        "v_THD": _random(num_tokens, heads, size),
        "dt_THN": _random(num_tokens, heads, 1),
        "b_TH": _random(num_tokens, heads),
        "A_H": -torch.rand(heads),
        "dt_bias_HN": torch.randn(heads, 1) - 4,
        "beta_scale": 1.0,
        "chunk": ssm.PIECE_TOKENS,
    }
    return Scan(
        f"gated delta rule, {heads} heads of {size} x {size}",
        ssm.gated_delta_rule,
        fallback_delta.gated_delta_rule,
        operands,
        "state_SHND",
        (heads, size, size),
    )


def _figures(scan: Scan, num_tokens: int, num_rounds: int) -> list[Figure]:
    captures = [(0, end * num_tokens // NUM_TOKENS, 2 + i) for i, end in enumerate(CAPTURE_ENDS)]
    states_S = torch.zeros(NUM_SLOTS, *scan.state_shape)
    plain, capturing = (
        StateMeta.build(num_queries=[num_tokens], slots=[1], has_history=[True], captures=kept)
        for kept in ((), captures)
    )
    operands = {**scan.operands, scan.state_name: states_S}
    operation, torchs = partial(scan.ours, **operands), partial(scan.torchs, **operands)
    operation(meta=capturing)  # what is built on first use
    rounds = [
        (
            _seconds(partial(operation, meta=plain)),
            _seconds(partial(operation, meta=capturing)),
            _seconds(partial(torchs, meta=plain)),
            _seconds(scan.peer) if scan.peer else 0.0,
        )
        for _ in range(num_rounds)
    ]
    ours, capturing_ours, in_torch, in_transformers = zip(*rounds, strict=True)
    figures = [
        Figure(scan.name, "ms", tuple(seconds * 1e3 for seconds in ours)),
        Figure(
            "  with states kept on the way / without", "x", _ratios(capturing_ours, ours), at_most=MOST_CAPTURE_RATIO
        ),
        Figure("  torch's time / ours", "x", _ratios(in_torch, ours)),
    ]
    if scan.peer:
        ratios = _ratios(in_transformers, ours)
        figures.append(Figure("  transformers' loop over tokens / ours", "x", ratios, at_least=LEAST_LOOP_RATIO))
    return figures


def _ratios(numerators: Sequence[float], denominators: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b for a, b in zip(numerators, denominators, strict=True))


def _seconds(operation: Callable[[], object]) -> float:
    """Return the time of the fastest of some calls: a neighbour only ever adds to it."""
    times = []
    for _ in range(CALLS_IN_ROUND):
        start = time.perf_counter()
        operation()
        times.append(time.perf_counter() - start)
    return min(times)


def _random(*shape: int) -> Tensor:
    return torch.randn(shape).bfloat16()
