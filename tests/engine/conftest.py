"""What several test files share: a tokenizer of single bytes, an engine that plays a script, a tiny Gemma on disk."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from scripted_engine import EOS, make_byte_tokenizer, make_scripted_engine
from tiny_gemma import save_tiny_gemma3
from transformers import JambaConfig, JambaForCausalLM, PreTrainedTokenizerFast

from hybrid_engine.engine import Engine
from hybrid_engine.step_plan import StartedRequest


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_byte_tokenizer()


@pytest.fixture(scope="session")
def ids(byte_tokenizer) -> Callable[[str], list[int]]:
    """Token ids of a text, one a byte."""
    return lambda text: byte_tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def scripted(byte_tokenizer, ids):
    """Make an engine whose every request is answered with a text (or what a function of the request returns)."""

    def make(answer: str | Callable[[StartedRequest], Sequence[int]] = "", **settings) -> Engine:
        script = answer if callable(answer) else lambda request: [*ids(answer), EOS]
        return make_scripted_engine(byte_tokenizer, script, **settings)

    return make


@pytest.fixture(scope="session")
def tiny_gemma3(byte_tokenizer, tmp_path_factory) -> Path:
    """A tiny random Gemma 3 on disk."""
    return save_tiny_gemma3(tmp_path_factory.mktemp("tiny-gemma3"), byte_tokenizer)


@pytest.fixture(scope="session")
def tiny_jamba(byte_tokenizer, tmp_path_factory) -> Path:
    """A random Jamba of three layers, one of them attention, on disk."""
    torch.manual_seed(0)
    config = JambaConfig(
        vocab_size=259,
        hidden_size=48,
        intermediate_size=56,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.2,
        attn_layer_period=3,
        attn_layer_offset=1,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=2,
        num_experts_per_tok=1,
        mamba_d_state=6,
        mamba_dt_rank=5,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    folder = tmp_path_factory.mktemp("tiny-jamba")
    JambaForCausalLM(config).save_pretrained(folder)
    byte_tokenizer.save_pretrained(folder)
    return folder
