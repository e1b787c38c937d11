"""Logits of tiny random hybrids against transformers, in float32, one forward of the whole text.

transformers is compared with one-shot forwards alone: its own continuation of a Mamba-1 cache is wrong.
"""

from __future__ import annotations

import pytest
import state_families
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from hybrid_engine.groups.spec import MambaSpec
from hybrid_engine.models.layers.moe import softmax_then_top, top_then_softmax
from hybrid_engine.models.registry import build_model, describe_model, load_model
from hybrid_engine.weights import open_checkpoint

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
    "lfm2": lambda: (
        Lfm2ForCausalLM,
        Lfm2Config(
            **COMMON | ATTENTION,
            num_hidden_layers=4,
            full_attn_idxs=[1, 3],
            conv_L_cache=CONV,
            conv_bias=True,
            norm_eps=1e-3,
            block_multiple_of=24,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        ),
    ),
    "lfm3": lambda: (
        Lfm3ForCausalLM,
        Lfm3Config(
            **COMMON | ATTENTION,
            num_hidden_layers=6,
            layer_types=["conv", "sliding_attention", "full_attention", "conv", "full_attention", "sliding_attention"],
            head_dim=12,
            sliding_window=CHUNK,
            conv_L_cache=CONV,
            norm_eps=1e-3,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
                "full_attention": {
                    "rope_type": "proportional",
                    "rope_theta": 90.0,
                    "partial_rotary_factor": 0.4,
                    "factor": 1.5,
                },
            },
        ),
    ),
    "lfm3 plain, with biases, not tied": lambda: (
        Lfm3ForCausalLM,
        Lfm3Config(
            **COMMON | ATTENTION,
            num_hidden_layers=6,
            head_dim=10,
            sliding_window=CHUNK,
            conv_bias=True,
            attention_bias=True,
            use_sandwich_norm=False,
            use_attention_gate=False,
            tie_word_embeddings=False,
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
MODELS |= state_families.FAMILIES
MAX_TOKENS = 200

every_model = pytest.mark.parametrize("name", MODELS)


def random_tokens(count: int, seed: int = 1) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def their_logits(model: torch.nn.Module, token_ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([token_ids]), use_cache=False).logits[0].float()


@every_model
@pytest.mark.parametrize("length", [1, CONV - 1, CONV, CHUNK - 1, CHUNK, CHUNK + 1, 48, MAX_TOKENS])
def test_logits_equal_transformers(name, length, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens = random_tokens(length)
    logits_TV = paged_run(ours, max_tokens=MAX_TOKENS).step({0: tokens})[0]
    expected_TV = their_logits(theirs, tokens)
    assert expected_TV.std() > 0.1
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE)


@every_model
@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_any_chunks_among_neighbours_give_the_logits_of_one_forward(name, chunk, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    num_tokens = 70 if chunk > 1 else 20
    tokens, others = random_tokens(num_tokens), random_tokens(num_tokens, seed=2)
    run = paged_run(ours, num_requests=3, max_tokens=num_tokens)
    run.step({2: others[:2]})
    found = [
        run.step({2: others[2 + i : 3 + i], 1: tokens[start : start + chunk], 0: others[start : start + chunk]})
        for i, start in enumerate(range(0, num_tokens, chunk))
    ]
    for request, text in ((0, others), (1, tokens)):
        logits_TV = torch.cat([logits[request] for logits in found])
        torch.testing.assert_close(logits_TV, their_logits(theirs, text), rtol=0, atol=TOLERANCE)


@every_model
def test_tokens_one_by_one_after_a_whole_prompt_give_the_logits_of_one_forward(name, tiny, paged_run):
    theirs, ours = tiny(*MODELS[name]())
    tokens = random_tokens(40)
    run = paged_run(ours)
    chunks = [run.step({0: tokens[:25]}), *(run.step({0: [token]}) for token in tokens[25:])]
    logits_TV = torch.cat([logits[0] for logits in chunks])
    torch.testing.assert_close(logits_TV, their_logits(theirs, tokens), rtol=0, atol=TOLERANCE)


@every_model
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
    # Half as much again: where a router wavers between two experts, either rounding may be the unlucky one.
    assert our_error < 1.5 * their_error


def test_the_router_of_jamba_shares_among_all_experts_and_granites_among_the_chosen():
    scores_TX = torch.tensor([[0.0, 2.0, 1.0, -1.0]])
    shares_X = scores_TX.softmax(1)[0]
    weights_TC, experts_TC = softmax_then_top(scores_TX, 2)
    assert experts_TC.tolist() == [[1, 2]]
    torch.testing.assert_close(weights_TC[0], shares_X[[1, 2]])
    weights_TC, experts_TC = top_then_softmax(scores_TX, 2)
    assert experts_TC.tolist() == [[1, 2]]
    torch.testing.assert_close(weights_TC[0], torch.tensor([2.0, 1.0]).softmax(0))


def test_a_model_without_attention_keeps_states_alone():
    specs = describe_model({"model_type": "mamba", "num_hidden_layers": 3}).cache_specs(block_size=16, element_bytes=2)
    assert specs == dict.fromkeys(range(3), MambaSpec((1536, 3), (1536, 16), conv_element_bytes=2))


def test_the_first_mamba_checkpoints_call_the_embedding_otherwise(tmp_path, save_tiny, tiny, paged_run, device):
    model_class, config = MODELS["mamba"]()
    save_tiny(model_class, config, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    tensors["lm_head.weight"] = tensors["backbone.embedding.weight"].clone()
    save_file(tensors, file, {"format": "pt"})
    ours = load_model(open_checkpoint(tmp_path), dtype=torch.float32, device=device)
    expected_TV = their_logits(tiny(model_class, config)[0], [5, 6])
    torch.testing.assert_close(paged_run(ours).step({0: [5, 6]})[0], expected_TV, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(("is_asked", "dtype"), [(True, torch.float32), (False, torch.bfloat16)])
def test_mambas_residual_stream_is_in_float32_where_its_config_asks(is_asked, dtype):
    config = {"model_type": "mamba", "vocab_size": 99, "hidden_size": 48, "num_hidden_layers": 1}
    model = build_model(config | {"residual_in_fp32": is_asked}, dtype=torch.bfloat16)
    x_TE = torch.full((2, 48), 2**-9, dtype=torch.bfloat16)
    normed_TE, sum_TE = model.layers[0].close(x_TE, torch.ones_like(x_TE), torch.ones(48))
    assert (normed_TE.dtype, sum_TE.dtype) == (torch.bfloat16, dtype)
    assert (sum_TE > 1).all() == is_asked
