"""Engines to compare with: each answers prompts of token ids greedily and gives back the new tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Protocol

import torch

from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

TokenIds = list[int]


class Peer(Protocol):
    """An engine under test. Nothing of one call may make the next one faster."""

    name: str

    def generate(self, prompts: list[TokenIds], num_new_tokens: int) -> list[TokenIds]:
        """Return exactly num_new_tokens greedy tokens for each prompt, end-of-text tokens ignored."""


class HybridEngine:
    """This engine, its prefix cache emptied before each call."""

    name = "hybrid-engine"

    def __init__(self, model: Path, *, num_threads: int, quantization: str | None = None) -> None:
        self._llm = LLM(model, dtype="bfloat16", quantization=quantization, num_threads=num_threads)

    def generate(self, prompts: list[TokenIds], num_new_tokens: int) -> list[TokenIds]:
        self._llm.reset_prefix_cache()
        sampling = SamplingParams(temperature=0, max_tokens=num_new_tokens, ignore_eos=True)
        return [output.outputs[0].token_ids for output in self._llm.generate(prompts, sampling, progress=False)]


class TransformersGenerate:
    """transformers' `generate` on one batch of prompts of equal length."""

    name = "transformers generate"

    def __init__(self, model: Any) -> None:
        """model: from load_transformers_model."""
        self._model = model

    def generate(self, prompts: list[TokenIds], num_new_tokens: int) -> list[TokenIds]:
        ids_RT = torch.tensor(prompts)
        with torch.inference_mode():
            all_ids_RT = self._model.generate(
                ids_RT, attention_mask=torch.ones_like(ids_RT), max_new_tokens=num_new_tokens, do_sample=False
            )
        return all_ids_RT[:, ids_RT.shape[1] :].tolist()


class TransformersContinuousBatching:
    """transformers' `generate_batch`, given memory and a step budget that hold the whole job."""

    name = "transformers continuous batching"

    def __init__(self, model: Any) -> None:
        """model: from load_transformers_model."""
        self._model = model

    def generate(self, prompts: list[TokenIds], num_new_tokens: int) -> list[TokenIds]:
        from transformers import GenerationConfig
        from transformers.generation import ContinuousBatchingConfig

        num_tokens = sum(map(len, prompts)) + len(prompts) * num_new_tokens
        page_size = ContinuousBatchingConfig.page_size
        outputs = self._model.generate_batch(
            prompts,
            # -1: no token ends an answer.
            generation_config=GenerationConfig(
                max_new_tokens=num_new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=4 * (num_tokens // page_size + len(prompts)), max_batch_tokens=max(num_tokens, page_size)
            ),
        )
        return [output.generated_tokens for output in outputs.values()]


def load_transformers_model(gguf_file: Path) -> Any:
    """Load a GGUF file with transformers, in bfloat16; the dequantised weights are kept for the next time.

    Left packed, as transformers loads GGUF by default, bfloat16 was slower. Raises ImportError when transformers can't
    read GGUF here (it needs accelerate).
    """
    from transformers import AutoModelForCausalLM, GgufConfig

    folder = _cache_folder() / f"{gguf_file.stem}-{gguf_file.stat().st_size}-bfloat16"
    if not (folder / "config.json").exists():
        model = AutoModelForCausalLM.from_pretrained(
            gguf_file.parent,
            gguf_file=gguf_file.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hybrid-engine" / "bench"
