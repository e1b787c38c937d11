"""Tiny random models of each kind of memory, as transformers saves them."""

from pathlib import Path

import torch
from transformers import (
    BambaConfig,
    BambaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    JambaConfig,
    JambaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
)

# The ids of a tokenizer of bytes. Large random weights: greedy answers depend on all of the prompt.
COMMON = {
    "vocab_size": 259,
    "hidden_size": 48,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
ATTENTION = {
    "intermediate_size": 56,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
JAMBA = {"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 5}
BAMBA = {"attn_layer_indices": [2], "mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 5}
MAMBA2 = {"num_heads": 6, "head_dim": 16, "n_groups": 2, "state_size": 5}
GEMMA = {"head_dim": 16, "sliding_window": 10, "layer_types": ["sliding_attention", "full_attention"] * 2}
TINY_MODELS = {
    "llama": lambda: (LlamaForCausalLM, LlamaConfig(**COMMON | ATTENTION, num_hidden_layers=2)),
    "gemma3": lambda: (Gemma3ForCausalLM, Gemma3TextConfig(**COMMON | ATTENTION, **GEMMA, num_hidden_layers=4)),
    "jamba": lambda: (JambaForCausalLM, JambaConfig(**COMMON | ATTENTION, **JAMBA, num_hidden_layers=5)),
    "bamba": lambda: (BambaForCausalLM, BambaConfig(**COMMON | ATTENTION, **BAMBA, num_hidden_layers=4)),
    "mamba2": lambda: (Mamba2ForCausalLM, Mamba2Config(**COMMON, **MAMBA2, num_hidden_layers=3)),
}


def save_tiny_model(name: str, folder: Path, *, seed: int = 0, **changes: object) -> None:
    """Make one of TINY_MODELS, its config's fields changed as asked, and save it."""
    model_class, config = TINY_MODELS[name]()
    for field, value in changes.items():
        assert hasattr(config, field), field
        setattr(config, field, value)
    torch.manual_seed(seed)
    model_class(config).save_pretrained(folder)
