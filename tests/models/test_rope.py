"""Rotary frequencies against transformers, which keeps one function for each scaling."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hybrid_engine.models.layers.rope import Rope, RopeTables
from hybrid_engine.models.registry import describe_model

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_hidden_layers": 1, "max_position_embeddings": 4096}
SCALINGS = {
    "linear": {"factor": 8.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 1024,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn with its ramp set": {
        "factor": 40.0,
        "original_max_position_embeddings": 512,
        "beta_fast": 20.0,
        "beta_slow": 2.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
    },
    "yarn not cut to whole dimensions": {"factor": 4.0, "original_max_position_embeddings": 1024, "truncate": False},
    "yarn with its magnitude set": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.5},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_equal_transformers(name):
    kind = name.split()[0]
    fields = {"rope_type": kind, "rope_theta": 30_000.0, **SCALINGS[name]}
    expected, magnitude = ROPE_INIT_FUNCTIONS[kind](LlamaConfig(**SIZES, rope_parameters=dict(fields)))
    rope = describe_model({"model_type": "llama", **SIZES, "rope_parameters": fields}).layers[0].rope
    torch.testing.assert_close(rope.frequencies(), expected, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(magnitude)


def test_divisors_slow_each_frequency_down():
    plain, slowed = Rope(1e4, 8), Rope(1e4, 8, scaling="divisors", divisors=(1.0, 2.0, 4.0, 8.0))
    torch.testing.assert_close(slowed.frequencies() * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain.frequencies())


def test_tables_hold_both_halves_of_each_rope():
    ropes = (Rope(1e4, 4), Rope(10.0, 2, magnitude=1.5))
    (cos_TD, sin_TD), (small_TD, _) = RopeTables(ropes)(torch.tensor([0, 3]))
    torch.testing.assert_close(sin_TD[1], torch.tensor([3.0, 0.03, 3.0, 0.03]).sin())
    torch.testing.assert_close(cos_TD[0], torch.ones(4))
    torch.testing.assert_close(small_TD[0], torch.full((2,), 1.5))
