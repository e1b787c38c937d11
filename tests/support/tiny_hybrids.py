"""Tiny random models of every kind of hybrid, each with a forward of whole texts by somebody else to compare with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import three_kinds
import torch
from torch import Tensor
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    FalconH1Config,
    FalconH1ForCausalLM,
    FalconMambaConfig,
    FalconMambaForCausalLM,
    GraniteMoeHybridConfig,
    GraniteMoeHybridForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    KimiLinearConfig,
    KimiLinearForCausalLM,
    Lfm2MoeConfig,
    Lfm2MoeForCausalLM,
    Lfm3Config,
    Lfm3ForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MiniMaxConfig,
    MiniMaxForCausalLM,
    NemotronHConfig,
    NemotronHForCausalLM,
    OlmoHybridConfig,
    OlmoHybridForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    Zamba2Config,
    Zamba2ForCausalLM,
    ZambaConfig,
    ZambaForCausalLM,
)

COMMON = {"vocab_size": 259, "hidden_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
# Large random weights: greedy answers depend on all of the prompt, not on its last token.
RANGE = {"initializer_range": 0.2}
ATTENTION = RANGE | {
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MAMBA2 = {"mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 6, "mamba_chunk_size": 16}
GRANITE = (
    COMMON
    | ATTENTION
    | MAMBA2
    | {
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "attention", "mamba", "mamba"],
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.7,
    }
)
FIVE_LAYERS = (
    COMMON
    | ATTENTION
    | {
        "num_hidden_layers": 5,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention", "full_attention"],
    }
)
DELTA_NET = {
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 6,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
THEIRS: dict[str, Callable] = {
    "jamba": lambda: (
        JambaForCausalLM,
        JambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=5,
            attn_layer_period=3,
            attn_layer_offset=1,
            expert_layer_period=2,
            expert_layer_offset=1,
            num_experts=4,
            num_experts_per_tok=2,
            mamba_d_state=6,
            mamba_dt_rank=5,
        ),
    ),
    "bamba": lambda: (
        BambaForCausalLM,
        BambaConfig(**COMMON | ATTENTION | MAMBA2, num_hidden_layers=4, attn_layer_indices=[2]),
    ),
    "granite": lambda: (GraniteMoeHybridForCausalLM, GraniteMoeHybridConfig(**GRANITE)),
    "granite with rope": lambda: (
        GraniteMoeHybridForCausalLM,
        GraniteMoeHybridConfig(**GRANITE, position_embedding_type="rope"),
    ),
    "mamba": lambda: (MambaForCausalLM, MambaConfig(**COMMON | RANGE, num_hidden_layers=3, state_size=6)),
    "falcon_mamba": lambda: (
        FalconMambaForCausalLM,
        FalconMambaConfig(**COMMON | RANGE, num_hidden_layers=3, state_size=6),
    ),
    "mamba2": lambda: (
        Mamba2ForCausalLM,
        Mamba2Config(**COMMON | RANGE, num_hidden_layers=3, state_size=6, num_heads=8, head_dim=12, n_groups=2),
    ),
    "falcon_h1": lambda: (
        FalconH1ForCausalLM,
        FalconH1Config(
            **COMMON | ATTENTION | MAMBA2,
            num_hidden_layers=3,
            mamba_d_ssm=40,
            key_multiplier=0.6,
            attention_in_multiplier=1.3,
            ssm_out_multiplier=1.4,
            ssm_multipliers=[0.8, 1.2, 0.7, 1.5, 1.1],
            mlp_multipliers=[1.6, 0.5],
        ),
    ),
    "nemotron_h": lambda: (
        NemotronHForCausalLM,
        NemotronHConfig(
            **COMMON | ATTENTION,
            hybrid_override_pattern="M-*EM",
            head_dim=12,
            ssm_state_size=6,
            mamba_num_heads=8,
            mamba_head_dim=6,
            n_groups=2,
            time_step_min=1e-9,
            n_routed_experts=4,
            moe_intermediate_size=24,
            moe_shared_expert_intermediate_size=32,
        ),
    ),
    "zamba": lambda: (
        ZambaForCausalLM,
        ZambaConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=5,
            layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba"],
            mamba_d_state=6,
        ),
    ),
    "recurrent_gemma": lambda: (
        RecurrentGemmaForCausalLM,
        RecurrentGemmaConfig(
            **COMMON | RANGE,
            intermediate_size=96,
            num_attention_heads=4,
            num_hidden_layers=5,
            block_types=["recurrent", "attention"],
            attention_window_size=20,
            logits_soft_cap=300.0,
            w_init_variance_scale=1.0,
        ),
    ),
    "zamba2": lambda: (
        Zamba2ForCausalLM,
        Zamba2Config(
            **COMMON | RANGE,
            intermediate_size=56,
            num_attention_heads=4,
            num_hidden_layers=5,
            layers_block_type=["mamba", "hybrid", "hybrid", "mamba", "hybrid"],
            num_mem_blocks=2,
            use_shared_attention_adapter=True,
            adapter_rank=5,
            use_mem_rope=True,
            mamba_d_state=6,
            mamba_ngroups=2,
            n_mamba_heads=8,
            time_step_min=1e-9,
        ),
    ),
    "qwen3_next": lambda: (
        Qwen3NextForCausalLM,
        Qwen3NextConfig(
            **FIVE_LAYERS | DELTA_NET,
            head_dim=16,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
        ),
    ),
    "qwen3_5": lambda: (Qwen3_5ForCausalLM, Qwen3_5TextConfig(**FIVE_LAYERS | DELTA_NET, head_dim=16)),
    "qwen3_5 with experts": lambda: (
        Qwen3_5MoeForCausalLM,
        Qwen3_5MoeTextConfig(
            **{key: value for key, value in (FIVE_LAYERS | DELTA_NET).items() if key != "intermediate_size"},
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
            shared_expert_intermediate_size=20,
        ),
    ),
    "lfm2_moe": lambda: (
        Lfm2MoeForCausalLM,
        Lfm2MoeConfig(
            **COMMON | ATTENTION,
            num_hidden_layers=4,
            layer_types=["conv", "full_attention", "conv", "conv"],
            num_dense_layers=1,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    "olmo_hybrid": lambda: (OlmoHybridForCausalLM, OlmoHybridConfig(**FIVE_LAYERS | DELTA_NET)),
    "kimi_linear": lambda: (
        KimiLinearForCausalLM,
        KimiLinearConfig(
            **FIVE_LAYERS | {"num_key_value_heads": 4},
            linear_num_heads=3,
            linear_head_dim=10,
            kv_lora_rank=14,
            qk_rope_head_dim=6,
            qk_nope_head_dim=8,
            v_head_dim=10,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        ),
    ),
    "minimax": lambda: (MiniMaxForCausalLM, MiniMaxConfig(**FIVE_LAYERS, num_local_experts=5)),
    "lfm3": lambda: (
        Lfm3ForCausalLM,
        Lfm3Config(
            **COMMON | ATTENTION,
            num_hidden_layers=5,
            layer_types=["conv", "sliding_attention", "full_attention", "conv", "sliding_attention"],
            head_dim=12,
            sliding_window=20,
            conv_L_cache=4,
        ),
    ),
}
THREE_KINDS = "three kinds"
NAMES = (*THEIRS, THREE_KINDS)
LIKE_OTHERS = ("falcon_mamba", "lfm2_moe", "recurrent_gemma", "zamba")
"""What keeps nothing that another one doesn't keep too: tested when there is time."""


@dataclass
class TinyHybrid:
    """A model on disk, and what a forward of whole texts says about it."""

    folder: Path
    logits: Callable[[Sequence[Sequence[int]]], Tensor]
    """Of texts of one length: [texts, tokens, vocabulary]."""
    block_sizes: dict[str, int] = field(default_factory=dict)
    """By kind of group, where they are to differ from 16."""

    def check_greedy(self, prompts: Sequence[list[int]], answers: Sequence[list[int]], *, margin: float = 0.0) -> None:
        """Assert that every token of an answer is the likeliest one behind the text before it.

        One forward over prompt and answer tells that of all its tokens. margin: by how much it must lead, so that
        rounding can't make another one win.
        """
        for length in {(len(prompt), len(answer)) for prompt, answer in zip(prompts, answers, strict=True)}:
            pairs = [pair for pair in zip(prompts, answers, strict=True) if (len(pair[0]), len(pair[1])) == length]
            logits_RTV = self.logits([prompt + answer[:-1] for prompt, answer in pairs])[:, length[0] - 1 :]
            top = logits_RTV.topk(2, dim=-1)
            assert top.indices[..., 0].tolist() == [answer for _, answer in pairs]
            lead = float((top.values[..., 0] - top.values[..., 1]).min())
            assert lead > margin, f"a token leads by {lead} alone: take another seed"


def make(name: str, folder: Path, *, seed: int = 0) -> TinyHybrid:
    """Write a model to a folder."""
    if name == THREE_KINDS:
        weights = three_kinds.save(folder)
        sizes = {"full_attention": 16, "sliding_window": 32}
        return TinyHybrid(
            folder, lambda texts: torch.stack([three_kinds.logits(weights, list(text)) for text in texts]), sizes
        )
    torch.manual_seed(seed)
    model_class, config = THEIRS[name]()
    model = model_class(config).eval()
    model.save_pretrained(folder)

    # Whole texts always: transformers' own continuation of a Mamba-1 cache is wrong.
    @torch.inference_mode()
    def logits(texts: Sequence[Sequence[int]]) -> Tensor:
        return model(torch.tensor([list(text) for text in texts]), use_cache=False).logits

    return TinyHybrid(folder, logits)
