"""Every family with its linear weights in 8 bits: the same as with those weights written out."""

from __future__ import annotations

from collections.abc import Iterator

import attention_families
import delta_families
import pytest
import state_families
import torch
from logits import random_tokens

from hybrid_engine.errors import ConfigError
from hybrid_engine.kernels.linear import PackedLinear
from hybrid_engine.kernels.linear.int8 import Int8Form
from hybrid_engine.kernels.moe import PackedExperts
from hybrid_engine.models.registry import load_model
from hybrid_engine.weights import open_checkpoint

FAMILIES = attention_families.FAMILIES | delta_families.FAMILIES | state_families.FAMILIES
QUICK = ("gpt_oss", "gemma3n_text", "nemotron_h", "zamba", "kimi_linear")
"""With experts, tables that are looked up alone, Mamba-2 and MLPs, Mamba-1 in slices, and latent attention."""
LENGTH = 40
ROUNDED_INPUTS = 1e-2
"""Of the logits' deviation: 16 bits of inputs, through a few layers. Gemma 4's are 5e-3 apart, all others' at most
2e-3; weights in 8 bits change the logits of each family by 3e-2 or more."""


def packed_linears(value: object) -> Iterator[PackedLinear]:
    """All in a module, those of its experts too."""
    if isinstance(value, PackedLinear):
        yield value
    elif isinstance(value, torch.nn.Module):
        for each in value.modules():
            for attribute in vars(each).values():
                if isinstance(attribute, PackedLinear | PackedExperts):
                    yield from packed_linears(attribute)
    elif isinstance(value, PackedExperts):
        yield from value.form


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in FAMILIES]
)
def test_logits_are_those_of_the_rounded_weights(name, tmp_path, save_tiny, paged_run):
    save_tiny(*FAMILIES[name](), tmp_path)
    checkpoint, tokens = open_checkpoint(tmp_path), random_tokens(LENGTH)
    model = load_model(checkpoint, dtype=torch.float32, quantization="int8")
    rounded = [packed for packed in packed_linears(model) if isinstance(packed.form, Int8Form)]
    assert len(rounded) > model.info.num_layers
    logits_TV = paged_run(model).step({0: tokens})[0]
    for packed in rounded:
        packed.form = PackedLinear.pack(packed.weight_NK()).form
    expected_TV = paged_run(model).step({0: tokens})[0]
    torch.testing.assert_close(logits_TV, expected_TV, rtol=0, atol=ROUNDED_INPUTS * expected_TV.std().item())
    whole_TV = paged_run(load_model(checkpoint, dtype=torch.float32)).step({0: tokens})[0]
    assert not torch.allclose(whole_TV, logits_TV, rtol=0, atol=ROUNDED_INPUTS * expected_TV.std().item())


def test_routers_and_tables_that_are_looked_up_alone_keep_their_dtype(tmp_path, save_tiny):
    save_tiny(*FAMILIES["gpt_oss"](), tmp_path)
    model = load_model(open_checkpoint(tmp_path), dtype=torch.bfloat16, quantization="w8a8")
    assert model.quantization == "w8a8"
    assert model.layers[0].mlp.router.packed.data.dtype == torch.bfloat16
    assert model.embedding.packed.data.dtype == torch.bfloat16
    assert model.head.packed.data.dtype == torch.int8
    assert model.layers[0].mlp.experts.down.form[0].data.dtype == torch.int8


def test_a_model_that_transformers_runs_is_refused(tmp_path, save_tiny):
    save_tiny(*attention_families.GENERIC["flint"](), tmp_path)
    with pytest.raises(ConfigError, match="'int8', which model_type 'flint' can't have"):
        load_model(open_checkpoint(tmp_path), dtype=torch.float32, quantization="int8")
