"""An exact GPU path, in Triton's interpreter: the bits of a text don't depend on how it was cut, or beside whom."""

import pytest
import torch
from hand_plans import Hand
from tiny_models import save_tiny_model

from hybrid_engine.groups.spec import group_layers
from hybrid_engine.kernels.linear import cpu
from hybrid_engine.models.base import Model
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

PROMPT = [(i * i * 7 + 3 * i) % 99 + 5 for i in range(15)]
OTHER = [77, 12, 50]


@pytest.fixture
def model(interpreted, tmp_path, monkeypatch, request) -> Model:
    monkeypatch.setattr(cpu, "can_tile", lambda weight_NK: False)  # a GPU keeps weights as they are
    save_tiny_model(request.param, tmp_path, num_hidden_layers=2, **LAYERS[request.param])
    return load_model(open_checkpoint(tmp_path), dtype=torch.float32, exact=True)


LAYERS = {
    "gemma3": {"layer_types": ["sliding_attention", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
}


def last_logits(model: Model, chunks: list[int], *, beside: list[int]) -> torch.Tensor:
    """Those behind the prompt, computed in chunks; another text is computed in the last steps."""
    hand = Hand(model, group_layers(model.info.cache_specs(block_size=4, element_bytes=4)), num_blocks=20)
    seen = []
    logits, model.logits = model.logits, lambda hidden_XE: seen.append(logits(hidden_XE)) or seen[-1]
    try:
        hand.add("a", PROMPT)
        if beside:
            hand.add("b", OTHER)
        for index, size in enumerate(chunks):
            others = {"b": beside[index]} if index < len(beside) else {}
            hand.step(others | {"a": size})
    finally:
        del model.logits
    return seen[-1][-1]


@pytest.mark.parametrize("model", ["gemma3", pytest.param("bamba", marks=pytest.mark.slow)], indirect=True)
def test_a_prompt_has_the_same_bits_at_once_and_in_chunks_beside_another(model):
    at_once = last_logits(model, [15], beside=[])
    assert torch.equal(last_logits(model, [6, 8, 1], beside=[2, 1, 1]), at_once)
