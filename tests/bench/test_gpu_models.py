"""The benchmark of large models, on a small one and the CPU: it decodes as many steps as it says."""

from __future__ import annotations

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


def test_the_large_models_are_what_their_names_say():
    for name, config, billions in (("gemma", gpu_models.GEMMA3_4B, 3.9), ("granite", gpu_models.GRANITE4_7B, 6.7)):
        found = gpu_models.build_model(config, dtype=torch.bfloat16).info.num_parameters / 1e9
        assert abs(found - billions) < 0.15, (name, found)
