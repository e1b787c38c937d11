"""Families through the whole engine: cold and with hits, side by side, in small chunks, with little memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from attention_families import FAMILIES, GENERIC

from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams

MODELS = FAMILIES | GENERIC
QUICK = ("gemma4_text", "gpt_oss", "smollm3")
"""Shared keys and values, sinks and experts, a model of transformers' own code."""
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
MARGIN = 1e-3
"""By how much, of the logits' deviation, a token may be below the best one: sums in another order move them so far."""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in MODELS],
)
def saved(request, tmp_path_factory, byte_tokenizer) -> tuple[torch.nn.Module, Path]:
    """A family's tiny random model, every parameter moved, and its checkpoint with a tokenizer beside it."""
    folder = tmp_path_factory.mktemp("family")
    model_class, config = MODELS[request.param]()
    torch.manual_seed(0)
    model = model_class(config).float()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.2 if parameter.ndim == 1 else 0.1))
    model.save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    model.set_attn_implementation("eager")
    return model.eval(), folder


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, 99, (length,), generator=generator).tolist() for length in (70, 41, 23)]


def make_llm(folder: Path, **settings) -> LLM:
    return LLM(folder, dtype="float32", max_model_len=160, block_size=4, cache_memory_bytes="16MiB", **settings)


def answers(llm: LLM) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts(), GREEDY)]


def test_answers_are_those_of_transformers_cold_and_with_hits_in_any_chunks(saved):
    theirs, folder = saved
    with make_llm(folder, enable_prefix_caching=False) as llm:
        cold = answers(llm)
    check_greedy(theirs, cold)
    with make_llm(folder, max_num_batched_tokens=7) as llm:
        assert answers(llm) == cold
        again = llm.generate(prompts(), GREEDY)
    assert [output.outputs[0].token_ids for output in again] == cold
    assert all(output.num_cached_tokens > 0 for output in again)


@torch.inference_mode()
def check_greedy(theirs: torch.nn.Module, found: list[list[int]]) -> None:
    """Each token of each answer is the best one behind all before it, or as good."""
    for prompt, answer in zip(prompts(), found, strict=True):
        logits_TV = theirs(torch.tensor([prompt + answer]), use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen_T = logits_TV.gather(1, torch.tensor(answer)[:, None])[:, 0]
        assert (logits_TV.max(1).values - chosen_T).max() <= MARGIN * logits_TV.std()
