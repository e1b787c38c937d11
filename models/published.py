"""What the configs of well-known checkpoints say, written down by hand: only what decides about memory, and only what
is certain. A family without an entry is shown as its config class makes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Published:
    """A checkpoint and the fields of its config.json that differ from its family's defaults."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)


PUBLISHED = {
    "cohere2": Published(
        "CohereLabs/c4ai-command-r7b-12-2024",
        {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8},
    ),
    "exaone4": Published(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        {
            "hidden_size": 5120,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "sliding_window_pattern": "LLLG",
        },
    ),
    "falcon_h1": Published(
        "tiiuae/Falcon-H1-0.5B-Base",
        {"vocab_size": 32_784, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 36}
        | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "rope_theta": 1e11}
        | {"mamba_d_ssm": 1536, "mamba_n_heads": 24, "mamba_d_head": 64, "mamba_d_state": 128},
    ),
    "falcon_mamba": Published(
        "tiiuae/falcon-mamba-7b",
        {"vocab_size": 65_024, "hidden_size": 4096, "num_hidden_layers": 64, "tie_word_embeddings": False},
    ),
    "gemma2": Published("google/gemma-2-2b"),
    "gemma3_text": Published(
        "google/gemma-3-270m",
        {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"intermediate_size": 2048, "sliding_window": 512},
    ),
    "gemma3n_text": Published("google/gemma-3n-E4B"),
    "gpt_oss": Published("openai/gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "jamba": Published("ai21labs/Jamba-v0.1"),
    "kimi_linear": Published(
        "moonshotai/Kimi-Linear-48B-A3B-Instruct",
        {
            "linear_attn_config": {
                "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                "kda_layers": [n for n in range(1, 27) if n % 4],
                "num_heads": 32,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            }
        },
    ),
    "lfm2_moe": Published(
        "LiquidAI/LFM2-8B-A1B",
        {
            "num_hidden_layers": 24,
            "layer_types": ["full_attention" if i in (2, 6, 10, 14, 18, 21) else "conv" for i in range(24)],
        },
    ),
    "llama": Published("meta-llama/Llama-3.1-8B", {"num_key_value_heads": 8, "intermediate_size": 14_336}),
    "llama4_text": Published("meta-llama/Llama-4-Scout-17B-16E"),
    "mimo_v2_flash": Published("XiaomiMiMo/MiMo-V2-Flash"),
    "minimax": Published(
        "MiniMaxAI/MiniMax-Text-01",
        {"vocab_size": 200_064, "hidden_size": 6144, "intermediate_size": 9216, "num_hidden_layers": 80}
        | {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64}
        | {"layer_types": ["full_attention" if i % 8 == 7 else "linear_attention" for i in range(80)]}
        | {"num_local_experts": 32},
    ),
    "mistral": Published("mistralai/Mistral-7B-v0.1"),
    "nemotron_h": Published(
        "nvidia/Nemotron-H-8B-Base-8K",
        {"hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"},
    ),
    "mixtral": Published("mistralai/Mixtral-8x7B-v0.1"),
    "olmo_hybrid": Published("allenai/Olmo-Hybrid-7B", {"rope_parameters": {"rope_theta": None}}),
    "phi3": Published("microsoft/Phi-3-mini-4k-instruct", {"sliding_window": 2047}),
    "qwen2": Published(
        "Qwen/Qwen2.5-7B",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18_944},
    ),
    "qwen3": Published(
        "Qwen/Qwen3-8B", {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12_288}
    ),
    "recurrent_gemma": Published("google/recurrentgemma-2b", {"num_key_value_heads": 1, "intermediate_size": 15_360}),
    "zamba": Published("Zyphra/Zamba-7B-v1"),
    "qwen3_5_moe_text": Published("Qwen/Qwen3.5-35B-A3B"),
    "qwen3_5_text": Published("Qwen/Qwen3.5-9B"),
    "qwen3_next": Published("Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "zamba2": Published(
        "Zyphra/Zamba2-1.2B",
        {"hidden_size": 2048, "num_hidden_layers": 38, "num_attention_heads": 32}
        | {"layers_block_type": ["hybrid" if i in (5, 11, 17, 23, 29, 35) else "mamba" for i in range(38)]}
        | {"mamba_d_state": 128, "n_mamba_heads": 64, "use_shared_attention_adapter": True, "use_mem_rope": True},
    ),
}
"""By model_type."""


def config_of(kind: str) -> dict[str, Any]:
    """A config of a family's best-known checkpoint, or of its defaults where none is written down."""
    published = PUBLISHED.get(kind)
    return {"model_type": kind, **(published.config if published else {})}
