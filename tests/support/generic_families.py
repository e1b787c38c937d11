"""Every decoder of transformers that its own code is known to run here: tiny models made of whatever fields it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attention_families import COMMON, WINDOW
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

FIELDS = COMMON | {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "n_routed_experts": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "n_embd": 48,
    "n_layer": 4,
    "n_head": 6,
    "n_positions": 256,
    "dff": 56,
    "eos_token_id": 1,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
LATENT = ("deepseek_v2", "glm4_moe_lite", "minicpm3")
"""Keys and values are made of a latent vector, for as many heads as there are queries'."""
NAMES = [
    "afmoe",
    "apertus",
    "apertus1p5_text",
    "arcee",
    "aria_text",
    "beam",
    "biogpt",
    "bitnet",
    "cohere",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone",
    "exaone_moe",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "gpt_bigcode",
    "gpt_neox",
    "granite",
    "granitemoe",
    "granitemoe_swa",
    "granitemoeshared",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "kolibri1",
    "laguna",
    "mellum",
    "minicpm3",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral3",
    "modernbert-decoder",
    "moshi",
    "nanochat",
    "nemotron",
    "olmo",
    "olmo2",
    "olmoe",
    "persimmon",
    "phi",
    "qwen2_moe",
    "sarvam_moe",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
]
DIFFERENT = ("diffllama", "doge", "dory", "phimoe")
"""Some that the check refuses once their weights are there."""


def maker(kind: str) -> Callable[[], tuple[Any, Any]]:
    """What makes the model's class and config."""

    def make() -> tuple[Any, Any]:
        config_class = CONFIG_MAPPING[kind]
        known = config_class().to_dict().keys() | getattr(config_class, "attribute_map", {}).keys()
        fields = {name: value for name, value in FIELDS.items() if name in known}
        config = config_class(**fields | ({"num_key_value_heads": 6} if kind in LATENT else {}))
        return AutoModelForCausalLM._model_mapping[config_class], config

    return make


GENERIC = {kind: maker(kind) for kind in NAMES}
