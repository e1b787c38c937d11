"""Two models never share stored bytes unless all that decides what a byte means is equal."""

import pytest
import torch
from torch import nn

from hybrid_engine.connectors.fingerprint import cache_facts, weights_digest
from hybrid_engine.groups.spec import FullAttentionSpec, SlidingWindowSpec, group_layers
from hybrid_engine.kernels.linear import PackedLinear


class Layer(nn.Module):
    """Keeps its weights as our modules do: as attributes, some of them packed, some in lists."""

    __module__ = "hybrid_engine.models.test"

    def __init__(
        self, *, dtype: torch.dtype = torch.float32, quantization: str | None = None, is_exact: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.packed = PackedLinear.pack(torch.randn(8, 6, generator=generator).to(dtype), quantization)
        self.quantization, self.is_exact = quantization, is_exact
        self.norms = [torch.ones(5), torch.zeros(5)]
        self.bias = nn.Parameter(torch.ones(3))


def facts(model: nn.Module, config=None, *specs, unit: int = 16) -> dict:
    groups = group_layers(dict(enumerate(specs or [FullAttentionSpec(1, 8, 2)])))
    return cache_facts(model, config or {"rope": 1}, groups, match_unit_tokens=unit)


def test_a_model_loaded_again_has_the_same_digest():
    assert weights_digest(Layer()) == weights_digest(Layer())


@pytest.mark.parametrize("where", ["packed", "list", "parameter"])
def test_one_changed_value_anywhere_changes_the_digest(where):
    model = Layer()
    before = weights_digest(model)
    if where == "packed":
        model.packed = PackedLinear.pack(torch.randn(8, 6, generator=torch.Generator().manual_seed(1)))
    elif where == "list":
        model.norms[1][3] = 1e-3
    else:
        model.bias.data[2] = 2
    assert weights_digest(model) != before


def test_rows_that_changed_places_change_the_digest():
    model = Layer()
    model.table = torch.arange(12.0).reshape(4, 3)
    before = weights_digest(model)
    model.table = model.table[[1, 0, 2, 3]]
    assert weights_digest(model) != before


@pytest.mark.parametrize(
    "other",
    [
        facts(Layer(), {"rope": 2}),
        facts(Layer(), None, FullAttentionSpec(1, 8, 4)),
        facts(Layer(), None, SlidingWindowSpec(1, 8, 2, window=16)),
        facts(Layer(), None, SlidingWindowSpec(1, 8, 2, window=32)),
        facts(Layer(), None, FullAttentionSpec(1, 8, 2), FullAttentionSpec(1, 8, 2)),
        facts(Layer(), unit=8),
        facts(Layer(dtype=torch.bfloat16)),
        facts(Layer(quantization="int8")),
        facts(Layer(is_exact=True)),
    ],
    ids=["config", "dtype", "kind", "window", "layers", "unit", "weights' dtype", "weights' bits", "exact"],
)
def test_whatever_decides_what_a_byte_means_is_among_the_facts(other):
    assert other != facts(Layer())
    assert facts(Layer()) == facts(Layer())


def test_equal_weights_whose_inputs_are_rounded_in_another_way_have_other_facts():
    words, eight_bits = Layer(quantization="int8"), Layer(quantization="w8a8")
    assert weights_digest(words) == weights_digest(eight_bits)
    assert facts(words) != facts(eight_bits)


def test_a_model_without_tensors_is_an_error_of_ours():
    with pytest.raises(AssertionError, match="holds no tensor"):
        weights_digest(nn.Module())
