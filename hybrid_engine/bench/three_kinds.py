"""What a hit saves in a model with three kinds of memory, with blocks of three sizes: 16 tokens, 32, and states."""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models

from hybrid_engine.bench.report import Figure, Report
from hybrid_engine.llm import LLM
from hybrid_engine.models.registry import build_model
from hybrid_engine.sampling_params import SamplingParams

CONFIG = {
    "model_type": "three_kinds",
    "dtype": "bfloat16",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "layer_types": ["sliding_attention", "mamba2", "full_attention", "mamba2"] * 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "sliding_window": 256,
    "mamba_n_heads": 16,
    "mamba_d_state": 64,
}
BLOCK_SIZES = {"full_attention": 16, "sliding_window": 32}
PROMPT_TOKENS, TURN_TOKENS, NEW_TOKENS = 2048, 32, 16


def run(*, num_rounds: int = 3, num_threads: int | None = None, prompt_tokens: int = PROMPT_TOKENS) -> Iterator[Report]:
    """Measure a prompt that nobody has seen, and the next turn of its conversation.

    num_threads: None: as torch has it.
    """
    num_threads = num_threads or torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        write_random_checkpoint(CONFIG, Path(folder))
        llm = LLM(folder, block_sizes=BLOCK_SIZES, cache_memory_bytes="256MiB", num_threads=num_threads)
        rounds = [_measure(llm, prompt_tokens, seed) for seed in range(num_rounds + 1)][1:]  # the first one warms up
    cold, warm, found = (tuple(values) for values in zip(*rounds, strict=True))
    figures = (
        Figure(f"cold, {prompt_tokens:,} tokens", "s", cold),
        Figure(f"next turn, {TURN_TOKENS} tokens more", "s", warm),
        Figure("found of the next turn's prompt", "%", found),
        Figure("cold beside next turn", "x", tuple(a / b for a, b in zip(cold, warm, strict=True))),
    )
    kinds = ", ".join(
        f"{group.spec.kind} {BLOCK_SIZES.get(group.spec.kind, 'states')}" for group in llm.memory_plan.groups
    )
    notes = (
        f"random weights, {llm.model_info.num_parameters / 1e6:,.1f}M parameters, bfloat16, {num_threads} threads",
        f"{NEW_TOKENS} new tokens each; tokens in a block: {kinds}",
    )
    yield Report("Three kinds of memory in one model", figures, notes)


def _measure(llm: LLM, prompt_tokens: int, seed: int) -> tuple[float, float, float]:
    """Return seconds cold, seconds of the next turn, and the share of its prompt that was found, in percent."""
    draw = random.Random(seed)
    sampling = SamplingParams(max_tokens=NEW_TOKENS, temperature=0, ignore_eos=True)
    prompt = draw.choices(range(CONFIG["vocab_size"]), k=prompt_tokens)  # type: ignore[call-overload]
    start = time.perf_counter()
    (first,) = llm.generate([prompt], sampling, progress=False)
    between = time.perf_counter()
    turn = draw.choices(range(CONFIG["vocab_size"]), k=TURN_TOKENS)  # type: ignore[call-overload]
    (second,) = llm.generate([prompt + first.outputs[0].token_ids + turn], sampling, progress=False)
    end = time.perf_counter()
    assert first.num_cached_tokens == 0, f"{first.num_cached_tokens} tokens of a new prompt were found"
    return between - start, end - between, 100 * second.num_cached_tokens / len(second.prompt_token_ids or ())


def write_random_checkpoint(config: Mapping[str, Any], folder: Path) -> None:
    """Write a config, random weights of the sizes that it implies, and a tokenizer that knows one word a token."""
    draw = torch.Generator().manual_seed(0)
    parts = [part for weight, _ in build_model(config, dtype=torch.bfloat16).weights() for part in weight.parts]
    tensors = {}
    for part in parts:
        fan_in = part.shape[-1]
        values = torch.randn(part.shape, generator=draw) * (fan_in**-0.5 if len(part.shape) > 1 else 0.1)
        tensors[part.name] = (values + 1 if part.name.endswith("norm.weight") else values).bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    words = {f"w{index}": index for index in range(config["vocab_size"])}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
