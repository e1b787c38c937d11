"""Logits of tiny random models against transformers, in float32, one forward of the whole text."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

TOLERANCE = 1e-4
"""Logits are of order 1 and sums of some hundred float32 terms, in another order than transformers'."""

WINDOW = 8
SLIDING, FULL = "sliding_attention", "full_attention"
COMMON = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 56, "max_position_embeddings": 256}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 64}

MODELS = {
    "gemma3": lambda: (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=5,
            num_attention_heads=3,
            num_key_value_heads=1,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=[SLIDING, SLIDING, SLIDING, FULL, SLIDING],
            query_pre_attn_scalar=20,
            rope_parameters={
                SLIDING: {"rope_type": "default", "rope_theta": 100.0},
                FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5000.0},
            },
        ),
    ),
    "gemma3 with biases, untied, soft-capped": lambda: (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **COMMON,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=[FULL, SLIDING],
            attention_bias=True,
            tie_word_embeddings=False,
            final_logit_softcapping=2.0,
        ),
    ),
    "gemma2": lambda: (
        Gemma2ForCausalLM,
        Gemma2Config(
            **COMMON,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=3,
            head_dim=8,
            sliding_window=WINDOW,
            layer_types=[FULL, SLIDING, SLIDING],
            query_pre_attn_scalar=5,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        ),
    ),
    "llama with biases, llama3 rope": lambda: (
        LlamaForCausalLM,
        LlamaConfig(
            **COMMON,
            num_hidden_layers=2,
            num_attention_heads=6,
            num_key_value_heads=2,
            attention_bias=True,
            mlp_bias=True,
            rope_parameters=dict(LLAMA3),
        ),
    ),
    "llama tied, yarn rope": lambda: (
        LlamaForCausalLM,
        LlamaConfig(
            **COMMON,
            num_hidden_layers=2,
            num_attention_heads=3,
            head_dim=24,
            tie_word_embeddings=True,
            rope_parameters=dict(YARN),
        ),
    ),
    "mistral": lambda: (
        MistralForCausalLM,
        MistralConfig(
            **COMMON, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, sliding_window=WINDOW
        ),
    ),
    "qwen2 with a window from layer 1 on": lambda: (
        Qwen2ForCausalLM,
        Qwen2Config(
            **COMMON,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
    ),
    "qwen3": lambda: (
        Qwen3ForCausalLM,
        Qwen3Config(**COMMON, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2, head_dim=16),
    ),
}

every_model = pytest.mark.parametrize("name", MODELS)


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, COMMON["vocab_size"], (count,), generator=torch.Generator().manual_seed(1)).tolist()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids])).logits[0].float()


@every_model
@pytest.mark.parametrize("length", [1, WINDOW - 1, WINDOW, WINDOW + 1, 50])
def test_logits_equal_transformers(name, length, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens = random_tokens(length)
    logits_TV = paged_run(ours).step({0: tokens})[0]
    expected_TV = their_logits(theirs, tokens)
    assert expected_TV.std() > 0.1
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE)


@every_model
def test_a_text_in_chunks_among_neighbours_gives_the_logits_of_one_forward(name, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens, others = random_tokens(50), random_tokens(61)[::-1]
    run = paged_run(ours, num_requests=3)
    run.step({2: others[:11]})
    chunks = [
        run.step({0: others[start:stop], 1: tokens[start:stop], 2: others[start + 11 : start + 12]})[1]
        for start, stop in pairwise([0, 1, 8, 9, 29, 42, 50])
    ]
    torch.testing.assert_close(torch.cat(chunks), their_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["gemma3", "gemma2", "qwen2 with a window from layer 1 on"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name, tmp_path, save_tiny, tiny, paged_run, device):
    model_class, config = MODELS[name]()
    exact, _ = tiny(model_class, config)
    save_tiny(model_class, config, tmp_path)
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16, attn_implementation="eager").eval()
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16, device=device)
    tokens = random_tokens(50)
    expected_TV = their_logits(exact, tokens)
    our_error = (paged_run(ours).step({0: tokens})[0] - expected_TV).square().mean().sqrt()
    their_error = (their_logits(theirs, tokens) - expected_TV).square().mean().sqrt()
    assert our_error < 1.5 * their_error


def test_gemma_rounds_the_embedding_scale_to_the_dtype_first(tmp_path, save_tiny):
    model_class, config = MODELS["gemma3"]()
    save_tiny(model_class, config, tmp_path)
    theirs = model_class.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16)
    tokens_T = torch.arange(COMMON["vocab_size"])
    torch.testing.assert_close(ours.embedding(tokens_T), theirs.model.embed_tokens(tokens_T), rtol=0, atol=0)


def test_a_tied_head_is_the_embedding_itself(tiny):
    _, ours = tiny(*MODELS["gemma3"]())
    assert ours.head is ours.embedding


# On a GPU this would end the process; the engine checks prompts before.
@pytest.mark.parametrize("device", ["cpu"], indirect=True)
def test_a_token_outside_the_vocabulary_is_an_error(tiny, paged_run):
    _, ours = tiny(*MODELS["gemma3"]())
    with pytest.raises(IndexError):
        paged_run(ours).step({0: [COMMON["vocab_size"]]})
