"""The model of three kinds of memory against a plain forward that shares no code with it."""

from __future__ import annotations

import pytest
import three_kinds
import torch

from hybrid_engine.errors import ConfigError
from hybrid_engine.models.registry import describe_model, load_model
from hybrid_engine.weights import open_checkpoint

TOLERANCE = 5e-4
"""Logits are of order 1 and sums of some hundred float32 terms through six layers; the other side has float64."""
WINDOW, CONV, MAX_TOKENS = three_kinds.WINDOW, three_kinds.CONV, 200


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The checkpoint's weights, and our model loaded from it."""
    folder = tmp_path_factory.mktemp("three-kinds")
    return three_kinds.save(folder), load_model(open_checkpoint(folder), dtype=torch.float32)


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, 259, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.mark.parametrize("length", [1, CONV - 1, CONV, WINDOW - 1, WINDOW, WINDOW + 1, MAX_TOKENS])
def test_logits_are_those_of_the_plain_forward(made, length, paged_run):
    weights, model = made
    tokens = random_tokens(length)
    expected_TV = three_kinds.logits(weights, tokens)
    assert expected_TV.std() > 0.5
    logits_TV = paged_run(model, max_tokens=length).step({0: tokens})[0]
    torch.testing.assert_close(logits_TV.double(), expected_TV, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("chunk", [1, 3, 7, 64])
def test_any_chunks_give_the_logits_of_the_plain_forward(made, chunk, paged_run):
    weights, model = made
    tokens = random_tokens(70)
    run = paged_run(model, max_tokens=70)
    logits_TV = torch.cat([run.step({0: tokens[i : i + chunk]})[0] for i in range(0, 70, chunk)])
    torch.testing.assert_close(logits_TV.double(), three_kinds.logits(weights, tokens), rtol=0, atol=TOLERANCE)


def test_a_config_without_a_list_of_layers_is_refused():
    with pytest.raises(ConfigError, match="layer_types is missing, must list each layer as full_attention, sliding"):
        describe_model({"model_type": "three_kinds"})
