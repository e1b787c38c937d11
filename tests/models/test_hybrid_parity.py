"""Logits of tiny random hybrids against transformers, in float32, one forward of the whole text.

transformers is compared with one-shot forwards alone: its own continuation of a Mamba-1 cache is wrong.
"""

from __future__ import annotations

import pytest
import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

TOLERANCE = 1e-4
"""Logits are of order 1 and sums of some hundred float32 terms, in another order than transformers'."""

CONV, CHUNK = 3, 16
"""Width of the convolutions; tokens that transformers' Mamba-2 scans at once."""
COMMON = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 56, "eos_token_id": None, "pad_token_id": None}
ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
MAMBA1 = {"mamba_d_state": 5, "mamba_d_conv": CONV, "mamba_dt_rank": 7}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 5, "mamba_d_conv": CONV, "mamba_chunk_size": CHUNK}
GRANITE = (
    COMMON
    | ATTENTION
    | MAMBA2
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 40,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 0.7,
    }
)

MODELS = {
    "jamba": lambda: (
        JambaForCausalLM,
        JambaConfig(
            **COMMON | ATTENTION | MAMBA1,
            num_hidden_layers=7,
            attn_layer_period=3,
            attn_layer_offset=2,
            expert_layer_period=4,
            expert_layer_offset=1,
            num_experts=5,
            num_experts_per_tok=3,
        ),
    ),
    "jamba without experts, with biases, tied": lambda: (
        JambaForCausalLM,
        JambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=3,
            attn_layer_period=2,
            attn_layer_offset=0,
            num_experts=1,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            mamba_expand=1,
            tie_word_embeddings=True,
        ),
    ),
    "bamba": lambda: (
        BambaForCausalLM,
        BambaConfig(
            **COMMON | ATTENTION | MAMBA2,
            num_hidden_layers=4,
            attn_layer_indices=[0, 2],
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
            attention_bias=True,
            mlp_bias=True,
            mamba_proj_bias=True,
            time_step_limit=[0.2, 0.9],
        ),
    ),
    "granite with experts": lambda: (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(**GRANITE, num_local_experts=5, num_experts_per_tok=3),
    ),
    "granite dense, with rope": lambda: (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(
            **GRANITE,
            num_local_experts=0,
            position_embedding_type="rope",
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
            mamba_conv_bias=False,
        ),
    ),
    "mamba": lambda: (
        MambaForCausalLM,
        MambaConfig(
            vocab_size=99,
            hidden_size=48,
            num_hidden_layers=3,
            state_size=5,
            conv_kernel=CONV,
            time_step_rank=7,
            use_bias=True,
            layer_norm_epsilon=1e-3,
        ),
    ),
    "mamba2": lambda: (
        Mamba2ForCausalLM,
        Mamba2Config(
            vocab_size=99,
            hidden_size=48,
            num_hidden_layers=3,
            num_heads=6,
            head_dim=16,
            n_groups=2,
            state_size=5,
            conv_kernel=CONV,
            chunk_size=CHUNK,
            time_step_limit=[0.2, 0.9],
        ),
    ),
}
MAX_TOKENS = 200

every_model = pytest.mark.parametrize("name", MODELS)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@every_model
@pytest.mark.parametrize("length", [1, CONV - 1, CONV, CHUNK - 1, CHUNK, CHUNK + 1, MAX_TOKENS])
def test_logits_equal_transformers(name, length, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens = random_tokens(length)
    logits_TV = paged_run(ours, max_tokens=MAX_TOKENS).step({0: tokens})[0]
    expected_TV = their_logits(theirs, tokens)
    assert expected_TV.std() > 0.1
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE)
