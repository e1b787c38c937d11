"""What is peculiar to Falcon-H1, Nemotron-H, Zamba 2 and RecurrentGemma."""

from __future__ import annotations

from dataclasses import replace

import pytest
import state_families
import torch

from hybrid_engine.groups.spec import FullAttentionSpec, MambaSpec
from hybrid_engine.kernels.ssm import StateMeta
from hybrid_engine.models.layers.rg_lru import first_tokens
from hybrid_engine.models.registry import build_model, load_model
from hybrid_engine.weights import open_checkpoint

TOLERANCE = 1e-4
LIMIT = (0.2, 0.9)
"""Of time steps: most of the tiny models' are outside."""


def random_tokens(count: int) -> list[int]:
    return torch.randint(0, 99, (count,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module", params=["nemotron_h", "zamba2"])
def limited(request, tmp_path_factory, save_tiny, device):
    """Transformers' model told to keep the limit in both of its paths, and ours with the limit in its config."""
    model_class, config = state_families.FAMILIES[request.param]()
    config.time_step_limit = list(LIMIT)
    folder = tmp_path_factory.mktemp("limited")
    save_tiny(model_class, config, folder)
    theirs = model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for module in theirs.modules():
        if hasattr(module, "time_step_limit") and hasattr(module, "A_log"):
            module.time_step_limit = LIMIT
    return theirs, load_model(open_checkpoint(folder), dtype=torch.float32, device=device)


@pytest.mark.parametrize("chunk", [1, 60], ids=["one by one", "whole"])
def test_time_steps_are_cut_to_the_limit_in_a_prompt_and_in_what_follows(limited, chunk, paged_run):
    theirs, ours = limited
    tokens = random_tokens(60)
    with torch.inference_mode():
        expected_TV = theirs(torch.tensor([tokens]), use_cache=False).logits[0]
    run = paged_run(ours)
    logits_TV = torch.cat([run.step({0: tokens[start : start + chunk]})[0] for start in range(0, 60, chunk)])
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=TOLERANCE)


def test_a_layer_with_attention_and_a_state_keeps_both():
    info = build_model(state_families.FAMILIES["falcon_h1"]()[1].to_dict(), dtype=torch.float32).info
    specs = info.cache_specs(block_size=16, element_bytes=4)
    assert [type(spec) for spec in specs.values()] == [FullAttentionSpec, MambaSpec] * 3
    assert [layer.index for layer in info.cached_layers] == [0, 0, 1, 1, 2, 2]
    assert info.num_layers == 3


def test_a_layer_without_a_mixer_keeps_nothing():
    info = build_model(state_families.FAMILIES["nemotron_h"]()[1].to_dict(), dtype=torch.float32).info
    kinds = "mlp mamba2 full_attention mamba2 mlp full_attention mamba2"
    assert " ".join(layer.kind for layer in info.layers) == kinds
    assert [layer.index for layer in info.cached_layers] == [1, 2, 3, 5, 6]


def test_shared_blocks_take_turns_and_each_use_keeps_keys_and_values_of_its_own():
    model = build_model(state_families.FAMILIES["zamba2"]()[1].to_dict(), dtype=torch.float32)
    blocks = [layer.block for layer in model.layers]
    assert blocks[1] is blocks[4]
    assert blocks[1] is not blocks[3]
    assert [block is None for block in blocks] == [True, False, True, False, False, True]
    attention = [layer for layer in model.info.cached_layers if layer.kind == "full_attention"]
    assert [layer.index for layer in attention] == [1, 3, 4]


def test_a_loaded_layer_that_is_not_what_its_rows_say_is_caught(tiny):
    _, ours = tiny(*state_families.FAMILIES["falcon_h1"]())
    layer = ours.layers[0]
    attention, mamba = ours.rows[0]
    layer.check(attention, mamba)
    with pytest.raises(AssertionError):
        layer.check(attention, replace(mamba, index=1))


def test_the_first_token_of_a_text_is_known_also_beside_requests_without_tokens():
    meta = StateMeta.build(
        num_queries=[0, 3, 1, 0, 2, 0], slots=[1, 2, 3, 4, 5, 6], has_history=[False, False, True, False, True, False]
    )
    assert first_tokens(meta).tolist() == [True, False, False, False, False, False]
