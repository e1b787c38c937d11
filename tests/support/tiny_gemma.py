"""A random Gemma 3 of four layers (window 8, every second one sees all) with a tokenizer of bytes, on disk."""

from pathlib import Path

import torch
from scripted_engine import BOS, EOS, VOCAB_SIZE
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedTokenizerFast


def save_tiny_gemma3(folder: Path, tokenizer: PreTrainedTokenizerFast) -> Path:
    """Save it and return the folder."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"] * 2,
        max_position_embeddings=256,
        initializer_range=0.2,  # large enough that greedy answers differ from prompt to prompt
        bos_token_id=BOS,
        eos_token_id=EOS,
        pad_token_id=2,
    )
    Gemma3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
