"""What guessing ahead brings on real weights: the same engine with and without it, taking turns in every round."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.config import SpeculativeConfig
from hybrid_engine.demo import demo_checkpoint
from hybrid_engine.demo.conversations import HANDBOOK
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

NEW_TOKENS = 128
PROMPTS = {
    "copies a text": f"{HANDBOOK}The handbook once more, word for word:\n\n{HANDBOOK[:400]}",
    "writes freely": "Once upon a time, in a town by the sea where",
}
SAMPLINGS = {
    "greedy": SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
    "sampled": SamplingParams(temperature=0.8, seed=1, max_tokens=NEW_TOKENS, ignore_eos=True),
}
GOAL = 1.5


def run(
    *,
    model: Path | None = None,
    num_rounds: int = 3,
    num_threads: int | None = None,
    speculative: SpeculativeConfig | None = None,
) -> Iterator[Report]:
    """Compare speed and text with and without drafts, on a prompt that invites copying and on one that doesn't.

    model: a checkpoint; None: the one that the demo extra brings. speculative: None: n-grams, as they come.
    Raises CheckpointError when that isn't installed.
    """
    path = model or demo_checkpoint()
    num_threads = num_threads or torch.get_num_threads()
    speculative = speculative or SpeculativeConfig()
    plain = LLM(path, num_threads=num_threads)
    drafting = LLM(path, num_threads=num_threads, speculative=speculative)
    notes = (f"{NEW_TOKENS} new tokens, one request, {num_threads} threads, {speculative}",)
    for title, prompt in PROMPTS.items():
        for kind, sampling in SAMPLINGS.items():
            goal = GOAL if (title, kind) == ("copies a text", "greedy") else None
            figures = _compare(plain, drafting, prompt, sampling, num_rounds=num_rounds, goal=goal)
            yield Report(f"Speculation, an answer that {title}, {kind}", figures, notes)


def _compare(
    plain: LLM, drafting: LLM, prompt: str, sampling: SamplingParams, *, num_rounds: int, goal: float | None
) -> tuple[Figure, ...]:
    speeds: dict[LLM, list[float]] = {plain: [], drafting: []}
    shares, equal = [], []
    for _ in range(num_rounds):
        outputs = {llm: _generate(llm, prompt, sampling) for llm in speeds}
        for llm, output in outputs.items():
            speeds[llm].append(_tokens_per_second(output))
        metrics = outputs[drafting].metrics
        shares.append(metrics.num_accepted_tokens / max(metrics.num_draft_tokens, 1))
        ours, theirs = (output.outputs[0].token_ids for output in outputs.values())
        equal.append(sum(a == b for a, b in zip(ours, theirs, strict=True)) / NEW_TOKENS)
    ratios = [fast / slow for slow, fast in zip(speeds[plain], speeds[drafting], strict=True)]
    return (
        Figure("without drafts", "new tokens/s", tuple(speeds[plain])),
        Figure("with drafts", "new tokens/s", tuple(speeds[drafting])),
        Figure("ratio", "x", tuple(ratios), at_least=goal),
        Figure("drafts accepted", "of those made", tuple(shares)),
        Figure("equal tokens", "of all", tuple(equal), at_least=1.0),
    )


def _generate(llm: LLM, prompt: str, sampling: SamplingParams) -> RequestOutput:
    llm.reset_prefix_cache()
    (output,) = llm.generate(prompt, sampling, progress=False)
    return output


def _tokens_per_second(output: RequestOutput) -> float:
    """Return the speed of the answer from its first token on: drafts do nothing for the prompt."""
    metrics = output.metrics
    assert metrics.total_seconds is not None, metrics
    assert metrics.ttft_seconds is not None, metrics
    return (NEW_TOKENS - 1) / (metrics.total_seconds - metrics.ttft_seconds)
