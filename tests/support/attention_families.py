"""Tiny random models of families that only attend, with periods, offsets and counts that are nobody's default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

WINDOW, CHUNK = 8, 12
SLIDING, FULL, CHUNKED = "sliding_attention", "full_attention", "chunked_attention"
COMMON = {
    "vocab_size": 99,
    "hidden_size": 48,
    "intermediate_size": 56,
    "max_position_embeddings": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
MIXED = [SLIDING, FULL, SLIDING, SLIDING, FULL]
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 500.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1],
    "long_factor": [1.5, 3.0],
}


EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def five_layers(**changes: Any) -> dict[str, Any]:
    """Fields of a model of five layers, windows in three of them."""
    return COMMON | {"num_hidden_layers": 5, "layer_types": MIXED, "sliding_window": WINDOW} | changes


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "phi3": lambda: (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(**COMMON, num_hidden_layers=2, sliding_window=WINDOW, rope_parameters=dict(PLAIN_ROPE)),
    ),
    "ministral": lambda: (
        hf.MinistralForCausalLM,
        hf.MinistralConfig(**five_layers(head_dim=16, rope_parameters=dict(PLAIN_ROPE))),
    ),
    "olmo3": lambda: (
        hf.Olmo3ForCausalLM,
        hf.Olmo3Config(
            **five_layers(attention_bias=True),
            rope_parameters={SLIDING: dict(PLAIN_ROPE), FULL: dict(YARN, rope_theta=3000.0, truncate=True)},
        ),
    ),
    "exaone4": lambda: (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config(**five_layers(head_dim=16, rope_parameters=dict(PLAIN_ROPE))),
    ),
    "exaone4 without a window": lambda: (
        hf.Exaone4ForCausalLM,
        hf.Exaone4Config(
            **COMMON,
            num_hidden_layers=2,
            sliding_window=None,
            layer_types=[FULL, FULL],
            tie_word_embeddings=True,
            rope_parameters=dict(PLAIN_ROPE),
        ),
    ),
    "cohere2": lambda: (
        hf.Cohere2ForCausalLM,
        hf.Cohere2Config(
            **five_layers(attention_bias=True, layer_norm_eps=1e-3, logit_scale=0.5, rope_parameters=dict(PLAIN_ROPE))
        ),
    ),
    "granite_swa": lambda: (
        hf.GraniteSWAForCausalLM,
        hf.GraniteSWAConfig(
            **five_layers(attention_bias=True, mlp_bias=True),
            layer_rope_theta=[50.0, 0, 900.0, 50.0, 100.0],
            embedding_multiplier=3.0,
            residual_multiplier=0.4,
            attention_multiplier=0.3,
            logits_scaling=0.7,
        ),
    ),
    "gpt_oss": lambda: (
        hf.GptOssForCausalLM,
        hf.GptOssConfig(
            **five_layers(head_dim=16, rope_parameters=dict(YARN)),
            num_local_experts=5,
            num_experts_per_tok=3,
            swiglu_alpha=1.3,
            swiglu_limit=0.8,
        ),
    ),
    "llama4_text": lambda: (
        hf.Llama4ForCausalLM,
        hf.Llama4TextConfig(
            **COMMON,
            num_hidden_layers=5,
            head_dim=16,
            intermediate_size_mlp=40,
            no_rope_layers=[1, 0, 1, 1, 0],
            moe_layers=[0, 1, 3],
            num_local_experts=5,
            num_experts_per_tok=2,
            attention_chunk_size=CHUNK,
            floor_scale=10,
            attn_scale=0.7,
            attention_bias=True,
            rope_parameters=dict(PLAIN_ROPE),
        ),
    ),
    "mimo_v2_flash": lambda: (
        hf.MiMoV2FlashForCausalLM,
        hf.MiMoV2FlashConfig(
            **five_layers(num_attention_heads=8, attention_bias=True, attention_value_scale=0.6),
            head_dim=12,
            v_head_dim=8,
            mlp_layer_types=["dense", "sparse", "sparse", "dense", "sparse"],
            moe_intermediate_size=24,
            n_routed_experts=8,
            num_experts_per_tok=3,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=1.7,
            rope_parameters={
                SLIDING: dict(PLAIN_ROPE, partial_rotary_factor=0.334),
                FULL: dict(PLAIN_ROPE, rope_theta=3000.0, partial_rotary_factor=0.5),
            },
        ),
    ),
    "mixtral": lambda: (
        hf.MixtralForCausalLM,
        hf.MixtralConfig(
            **COMMON,
            num_hidden_layers=2,
            head_dim=16,
            sliding_window=WINDOW,
            num_local_experts=5,
            num_experts_per_tok=3,
            rope_parameters=dict(PLAIN_ROPE),
        ),
    ),
    "qwen3_moe": lambda: (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **COMMON | EXPERTS, num_hidden_layers=4, head_dim=16, decoder_sparse_step=2, norm_topk_prob=True
        ),
    ),
    "qwen3_moe with a window, weights not normed": lambda: (
        hf.Qwen3MoeForCausalLM,
        hf.Qwen3MoeConfig(
            **COMMON | EXPERTS,
            num_hidden_layers=3,
            head_dim=16,
            mlp_only_layers=[1],
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=WINDOW,
        ),
    ),
    "phi3 with longrope": lambda: (
        hf.Phi3ForCausalLM,
        hf.Phi3Config(
            **COMMON,
            num_hidden_layers=2,
            original_max_position_embeddings=256,
            rope_parameters=LONGROPE | {"attention_factor": 1.2},
        ),
    ),
    "gemma3n_text": lambda: (
        hf.Gemma3nForCausalLM,
        hf.Gemma3nTextConfig(
            **five_layers(layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING], intermediate_size=[40, 56, 24, 40, 40]),
            head_dim=16,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=90,
            hidden_size_per_layer_input=6,
            altup_num_inputs=3,
            altup_active_idx=1,
            laurel_rank=4,
            activation_sparsity_pattern=[0.7, 0.0, 0.6, 0.0, 0.0],
            final_logit_softcapping=5.0,
            rope_parameters={SLIDING: dict(PLAIN_ROPE), FULL: dict(PLAIN_ROPE, rope_theta=3000.0)},
        ),
    ),
    "gemma4_text": lambda: (
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig(
            **five_layers(layer_types=[SLIDING, FULL, SLIDING, SLIDING, FULL]),
            head_dim=16,
            global_head_dim=32,
            num_kv_shared_layers=2,
            vocab_size_per_layer_input=99,
            hidden_size_per_layer_input=6,
            use_double_wide_mlp=True,
            final_logit_softcapping=5.0,
            rope_parameters={
                SLIDING: dict(PLAIN_ROPE),
                FULL: {"rope_type": "proportional", "rope_theta": 3000.0, "partial_rotary_factor": 0.4},
            },
        ),
    ),
    "gemma4_text with experts, keys as values": lambda: (
        hf.Gemma4ForCausalLM,
        hf.Gemma4TextConfig(
            **five_layers(layer_types=[FULL, SLIDING, SLIDING, SLIDING, FULL]),
            head_dim=16,
            global_head_dim=24,
            num_global_key_value_heads=1,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            enable_moe_block=True,
            num_experts=5,
            top_k_experts=2,
            moe_intermediate_size=24,
            rope_parameters={SLIDING: dict(PLAIN_ROPE), FULL: dict(PLAIN_ROPE, rope_theta=3000.0)},
        ),
    ),
}

GENERIC: dict[str, Callable[[], tuple[Any, Any]]] = {
    "smollm3": lambda: (
        hf.SmolLM3ForCausalLM,
        hf.SmolLM3Config(
            **five_layers(use_sliding_window=True, no_rope_layers=[1, 0, 1, 1, 0], rope_parameters=dict(PLAIN_ROPE))
        ),
    ),
    "vaultgemma": lambda: (
        hf.VaultGemmaForCausalLM,
        hf.VaultGemmaConfig(**five_layers(head_dim=16, attn_logit_softcapping=2.0, final_logit_softcapping=3.0)),
    ),
    "starcoder2": lambda: (
        hf.Starcoder2ForCausalLM,
        hf.Starcoder2Config(**COMMON, num_hidden_layers=2, sliding_window=WINDOW, rope_parameters=dict(PLAIN_ROPE)),
    ),
    "deepseek_v3": lambda: (
        hf.DeepseekV3ForCausalLM,
        hf.DeepseekV3Config(
            **COMMON | {"num_key_value_heads": 6},
            num_hidden_layers=2,
            kv_lora_rank=8,
            q_lora_rank=12,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=12,
            n_routed_experts=8,
            n_group=2,
            topk_group=1,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            first_k_dense_replace=1,
        ),
    ),
    "granitemoe_swa": lambda: (
        hf.GraniteMoeSWAForCausalLM,
        hf.GraniteMoeSWAConfig(**five_layers(), num_local_experts=5, num_experts_per_tok=2, logits_scaling=0.7),
    ),
    "flint": lambda: (
        hf.FlintForCausalLM,
        hf.FlintConfig(**five_layers(head_dim=16) | EXPERTS),
    ),
    "afmoe": lambda: (
        hf.AfmoeForCausalLM,
        hf.AfmoeConfig(**five_layers(head_dim=16) | EXPERTS, num_dense_layers=1),
    ),
    "gpt2": lambda: (
        hf.GPT2LMHeadModel,
        hf.GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=6, n_positions=256, eos_token_id=None),
    ),
}
"""Some of those that transformers' own code runs, with our attention."""
