"""Configs of tiny hybrids whose layers are more than a mixer and an MLP: non-default counts, periods and factors."""

from transformers import (
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

COMMON = {"vocab_size": 99, "hidden_size": 48, "intermediate_size": 56, "eos_token_id": None, "pad_token_id": None}
ATTENTION = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512}
CONV, CHUNK = 3, 16
FALCON_H1 = {
    "num_hidden_layers": 3,
    "head_dim": 12,
    "mamba_d_ssm": 40,
    "mamba_n_heads": 4,
    "mamba_n_groups": 2,
    "mamba_d_state": 5,
    "mamba_d_conv": CONV,
    "mamba_chunk_size": CHUNK,
    "embedding_multiplier": 1.7,
    "lm_head_multiplier": 0.8,
    "key_multiplier": 0.6,
    "attention_in_multiplier": 1.3,
    "attention_out_multiplier": 0.7,
    "ssm_in_multiplier": 0.9,
    "ssm_out_multiplier": 1.4,
    "ssm_multipliers": [0.8, 1.2, 0.7, 1.5, 1.1],
    "mlp_multipliers": [1.6, 0.5],
}
NEMOTRON_H = {
    "head_dim": 12,
    "ssm_state_size": 5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 5,
    "n_groups": 2,
    "conv_kernel": CONV,
    "chunk_size": CHUNK,
    # transformers cuts time steps to it in a prompt alone; the models were trained without.
    "time_step_min": 1e-9,
}
EXPERTS = {
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,  # a multiple of 8, for transformers in bfloat16
    "moe_shared_expert_intermediate_size": 32,
    "routed_scaling_factor": 1.5,
}
ZAMBA2 = {
    "num_attention_heads": 6,
    "mamba_d_state": 5,
    "mamba_d_conv": CONV,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "chunk_size": CHUNK,
    "adapter_rank": 7,
    "time_step_min": 1e-9,  # as in NEMOTRON_H
}
ZAMBA = {"mamba_d_state": 5, "mamba_d_conv": CONV, "mamba_dt_rank": 7}
RECURRENT_GEMMA = {"num_attention_heads": 3, "conv1d_width": CONV, "attention_window_size": CHUNK}
LFM2_MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "conv_L_cache": CONV,
    "norm_eps": 1e-3,
}

FAMILIES = {
    "falcon_h1": lambda: (
        FalconH1ForCausalLM,
        FalconH1Config(
            **COMMON | ATTENTION | FALCON_H1,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
            time_step_limit=[0.2, 0.9],
        ),
    ),
    "falcon_h1 with norms and biases, tied": lambda: (
        FalconH1ForCausalLM,
        FalconH1Config(
            **COMMON | ATTENTION | FALCON_H1 | {"mamba_d_ssm": None},
            mamba_rms_norm=True,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            projectors_bias=False,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "falcon_h1 with the gate inside the norm": lambda: (
        FalconH1ForCausalLM,
        FalconH1Config(
            **COMMON | ATTENTION | FALCON_H1, mamba_rms_norm=True, mamba_norm_before_gate=False, projectors_bias=True
        ),
    ),
    "nemotron_h": lambda: (
        NemotronHForCausalLM,
        NemotronHConfig(
            **COMMON | ATTENTION | NEMOTRON_H,
            hybrid_override_pattern="-M*M-*M",
            use_bias=True,
            mlp_bias=True,
            layer_norm_epsilon=1e-3,
        ),
    ),
    "nemotron_h with experts": lambda: (
        NemotronHForCausalLM,
        NemotronHConfig(
            **COMMON | ATTENTION | NEMOTRON_H | EXPERTS,
            hybrid_override_pattern="M*EME-M",
            n_group=3,
            topk_group=2,
            use_conv_bias=False,
        ),
    ),
    "nemotron_h with experts in a latent space": lambda: (
        NemotronHForCausalLM,
        NemotronHConfig(
            **COMMON | ATTENTION | NEMOTRON_H | EXPERTS,
            layers_block_type=["moe", "mamba", "attention"],
            moe_latent_size=16,
            norm_topk_prob=False,
        ),
    ),
    "zamba2": lambda: (
        Zamba2ForCausalLM,
        Zamba2Config(
            **COMMON | ZAMBA2,
            num_hidden_layers=6,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "hybrid", "mamba"],
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            use_mem_rope=True,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        ),
    ),
    "zamba2 without adapters of the attention, with biases": lambda: (
        Zamba2ForCausalLM,
        Zamba2Config(
            **COMMON | ZAMBA2,
            num_hidden_layers=4,
            layers_block_type=["hybrid", "hybrid", "mamba", "hybrid"],
            num_key_value_heads=2,
            add_bias_linear=True,
            hidden_act="gelu_pytorch_tanh",
            rms_norm_eps=1e-3,
        ),
    ),
    "falcon_mamba": lambda: (
        FalconMambaForCausalLM,
        FalconMambaConfig(
            vocab_size=99,
            hidden_size=48,
            num_hidden_layers=3,
            state_size=5,
            conv_kernel=CONV,
            time_step_rank=7,
            use_bias=True,
            mixer_rms_eps=1e-2,
            layer_norm_epsilon=1e-3,
        ),
    ),
    "falcon_mamba without bias of the convolution, not tied": lambda: (
        FalconMambaForCausalLM,
        FalconMambaConfig(
            vocab_size=99,
            hidden_size=48,
            num_hidden_layers=2,
            expand=3,
            state_size=4,
            use_conv_bias=False,
            tie_word_embeddings=False,
        ),
    ),
    "lfm2_moe": lambda: (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig(
            **COMMON | ATTENTION | LFM2_MOE,
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "full_attention"],
            num_dense_layers=1,
            routed_scaling_factor=1.5,
            conv_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0},
        ),
    ),
    "lfm2_moe without bias of the experts, not tied": lambda: (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig(
            **COMMON | ATTENTION | LFM2_MOE,
            num_hidden_layers=3,
            layer_types=["full_attention", "conv", "conv"],
            num_dense_layers=0,
            use_expert_bias=False,
            norm_topk_prob=False,
            tie_word_embeddings=False,
        ),
    ),
    "zamba": lambda: (
        ZambaForCausalLM,
        ZambaConfig(
            **COMMON | ATTENTION | ZAMBA,
            num_hidden_layers=7,
            attn_layer_period=3,
            attn_layer_offset=1,
            n_mamba_heads=3,
            mamba_proj_bias=True,
        ),
    ),
    "zamba from a list, without bias of the convolution": lambda: (
        ZambaForCausalLM,
        ZambaConfig(
            **COMMON | ATTENTION | ZAMBA,
            num_hidden_layers=4,
            layers_block_type=["hybrid", "mamba", "hybrid", "mamba"],
            n_mamba_heads=1,
            mamba_expand=3,
            mamba_conv_bias=False,
        ),
    ),
    "recurrent_gemma": lambda: (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig(
            **COMMON | RECURRENT_GEMMA,
            num_hidden_layers=5,
            block_types=["recurrent", "attention"],
            logits_soft_cap=3.0,
            rope_parameters={"rope_type": "default", "rope_theta": 50.0, "partial_rotary_factor": 0.25},
        ),
    ),
    "recurrent_gemma with biases, wider, not tied": lambda: (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig(
            **COMMON | RECURRENT_GEMMA,
            num_hidden_layers=4,
            lru_width=72,
            num_key_value_heads=1,
            attention_bias=True,
            rms_norm_eps=1e-3,
            tie_word_embeddings=False,
        ),
    ),
}
"""Makers of a model class and a config of transformers."""
