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
    "gemma2": Published("google/gemma-2-2b"),
    "gemma3_text": Published(
        "google/gemma-3-270m",
        {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "num_key_value_heads": 1}
        | {"intermediate_size": 2048, "sliding_window": 512},
    ),
    "gemma3n_text": Published("google/gemma-3n-E4B"),
    "gpt_oss": Published("openai/gpt-oss-20b", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "jamba": Published("ai21labs/Jamba-v0.1"),
    "llama": Published("meta-llama/Llama-3.1-8B", {"num_key_value_heads": 8, "intermediate_size": 14_336}),
    "llama4_text": Published("meta-llama/Llama-4-Scout-17B-16E"),
    "mimo_v2_flash": Published("XiaomiMiMo/MiMo-V2-Flash"),
    "mistral": Published("mistralai/Mistral-7B-v0.1"),
    "phi3": Published("microsoft/Phi-3-mini-4k-instruct", {"sliding_window": 2047}),
    "qwen2": Published(
        "Qwen/Qwen2.5-7B",
        {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"intermediate_size": 18_944},
    ),
    "qwen3": Published(
        "Qwen/Qwen3-8B", {"num_hidden_layers": 36, "num_key_value_heads": 8, "intermediate_size": 12_288}
    ),
}
"""By model_type."""


def config_of(kind: str) -> dict[str, Any]:
    """A config of a family's best-known checkpoint, or of its defaults where none is written down."""
    published = PUBLISHED.get(kind)
    return {"model_type": kind, **(published.config if published else {})}
