"""Tiny random models of families with delta nets or lightning attention, nothing in them at its default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import transformers as hf

DELTA, FULL = "linear_attention", "full_attention"
COMMON = {
    "vocab_size": 99,
    "hidden_size": 48,
    "max_position_embeddings": 256,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-4,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": None,
}
NET = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 10,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
}
# As many columns of keys as of values: transformers cuts the convolution into three equal parts when it saves it.
OLMO_NET = NET | {"linear_key_head_dim": 18, "linear_value_head_dim": 6}
EXPERTS = {
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 28,
}
KIMI = {
    "linear_num_heads": 3,
    "linear_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "kv_lora_rank": 14,
    "qk_rope_head_dim": 6,
    "qk_nope_head_dim": 8,
    "v_head_dim": 10,
}
KIMI_EXPERTS = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.7,
    "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
}
MINIMAX = {
    "num_experts_per_tok": 3,
    "block_size": 16,
    "full_attn_alpha_factor": 1.3,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 0.7,
    "linear_attn_beta_factor": 1.2,
    "mlp_alpha_factor": 1.1,
    "mlp_beta_factor": 0.9,
}
ROPE = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
MIXED = [DELTA, FULL, DELTA, DELTA, FULL]


def five_layers(**changes: Any) -> dict[str, Any]:
    """Fields of a model of five layers, two of them full attention."""
    return COMMON | {"num_hidden_layers": 5, "layer_types": list(MIXED), "intermediate_size": 56} | changes


FAMILIES: dict[str, Callable[[], tuple[Any, Any]]] = {
    "qwen3_next": lambda: (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(
            **five_layers(head_dim=16, rope_parameters=dict(ROPE)),
            **NET,
            **EXPERTS,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
        ),
    ),
    "qwen3_next with biases, tied, shares not normed": lambda: (
        hf.Qwen3NextForCausalLM,
        hf.Qwen3NextConfig(
            **five_layers(layer_types=None, num_hidden_layers=3, attention_bias=True, head_dim=8),
            **NET | {"linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 4},
            **EXPERTS,
            full_attention_interval=2,
            norm_topk_prob=False,
            tie_word_embeddings=True,
        ),
    ),
    "qwen3_5_text": lambda: (
        hf.Qwen3_5ForCausalLM,
        hf.Qwen3_5TextConfig(**five_layers(head_dim=16, rope_parameters=dict(ROPE, mrope_section=[2, 1, 1])), **NET),
    ),
    "qwen3_5_moe_text": lambda: (
        hf.Qwen3_5MoeForCausalLM,
        hf.Qwen3_5MoeTextConfig(
            **{key: value for key, value in five_layers().items() if key != "intermediate_size"}, **NET, **EXPERTS
        ),
    ),
    "olmo_hybrid": lambda: (
        hf.OlmoHybridForCausalLM,
        hf.OlmoHybridConfig(**five_layers(attention_bias=True, rope_parameters={"rope_theta": None}), **OLMO_NET),
    ),
    "olmo_hybrid with rope, betas below one": lambda: (
        hf.OlmoHybridForCausalLM,
        hf.OlmoHybridConfig(
            **five_layers(layer_types=None, tie_word_embeddings=True, rope_parameters={"rope_theta": 500.0}),
            **OLMO_NET,
            linear_allow_neg_eigval=False,
        ),
    ),
    "kimi_linear": lambda: (
        hf.KimiLinearForCausalLM,
        hf.KimiLinearConfig(**five_layers(num_key_value_heads=6), **KIMI, **KIMI_EXPERTS),
    ),
    "kimi_linear with narrow queries, biases, groups of experts": lambda: (
        hf.KimiLinearForCausalLM,
        hf.KimiLinearConfig(
            **five_layers(layer_types=None, num_key_value_heads=6, attention_bias=True),
            **KIMI,
            **KIMI_EXPERTS
            | {"n_group": 3, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False, "mlp_layer_types": None},
            q_lora_rank=20,
            first_k_dense_replace=2,
        ),
    ),
    "minimax": lambda: (
        hf.MiniMaxForCausalLM,
        hf.MiniMaxConfig(**five_layers(head_dim=10, num_local_experts=5), **MINIMAX),
    ),
    "minimax with a window, tied": lambda: (
        hf.MiniMaxForCausalLM,
        hf.MiniMaxConfig(**five_layers(layer_types=None, sliding_window=9, tie_word_embeddings=True)),
    ),
}
