"""The benchmark of large models, on a small one and the CPU: it decodes as many steps as it says."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.bench import gpu_models

TINY = gpu_models.GRANITE4_7B | {
    "vocab_size": 100,
    "hidden_size": 32,
    "shared_intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 8,
}


def test_a_random_model_decodes_and_every_step_is_counted(monkeypatch):
    monkeypatch.setattr(gpu_models, "TIMED_STEPS", 3)
    device = torch.device("cpu")
    model = gpu_models.random_model(TINY, device)
    seconds, idle_share = gpu_models.time_decoding(model, 2, device, prompt_tokens=20)
    assert seconds > 0
    assert idle_share == 1  # no GPU was busy


TINY_EXPERTS = gpu_models.QWEN3_30B | {
    "vocab_size": 100,
    "hidden_size": 32,
    "moe_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def test_experts_that_nobody_chose_are_not_read():
    model = gpu_models.random_model(TINY_EXPERTS, torch.device("cpu"))
    experts = 2 * 8 * 3 * 16 * 32
    others = 2 * 32 * (8 + 8 * 8 + 4 * 8 + 100)  # router, qkv, out, head
    assert gpu_models.read_bytes(model, 1) == pytest.approx(experts / 4 + others, rel=0.1)
    assert gpu_models.read_bytes(model, 2) == pytest.approx(experts * 7 / 16 + others, rel=0.1)
    assert gpu_models.read_bytes(model, None) == pytest.approx(experts + others + 2 * 32 * 100, rel=0.1)


def test_the_large_models_are_what_their_names_say():
    models = (("gemma", gpu_models.GEMMA3_4B, 3.9), ("granite", gpu_models.GRANITE4_7B, 6.7))
    for name, config, billions in (*models, ("qwen", gpu_models.QWEN3_30B, 30.5)):
        found = gpu_models.build_model(config, dtype=torch.bfloat16).info.num_parameters / 1e9
        assert abs(found - billions) < 0.15, (name, found)
