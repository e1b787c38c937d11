"""How experts are chosen, and what their outputs are weighed with."""

from __future__ import annotations

import pytest
import torch

from hybrid_engine.models.base import FULL, LayerInfo, ModelInfo
from hybrid_engine.models.layers.moe import GroupedSigmoid, softmax_then_top, top_then_sigmoid, top_then_softmax
from hybrid_engine.models.layers.weight import Vector

SCORES_TX = torch.tensor([[2.0, -1.0, 0.5, 1.5]])


def correction(*values: float) -> Vector:
    vector = Vector("correction", len(values))
    vector.weight_E = torch.tensor(values)
    return vector


def test_the_highest_scores_go_through_a_sigmoid_each_by_itself():
    weights_TC, experts_TC = top_then_sigmoid(SCORES_TX, 2)
    assert experts_TC.tolist() == [[0, 3]]
    torch.testing.assert_close(weights_TC, torch.tensor([[2.0, 1.5]]).sigmoid())


def test_a_correction_decides_who_is_chosen_and_not_how_much_each_counts():
    route = GroupedSigmoid(correction(0, 1, 0, 0), is_normed=False, scale=3.0)
    weights_TC, experts_TC = route(SCORES_TX, 2)
    assert experts_TC.tolist() == [[1, 0]]
    torch.testing.assert_close(weights_TC, 3 * torch.tensor([[-1.0, 2.0]]).sigmoid())


def test_experts_are_chosen_within_the_best_groups_alone():
    # Of the groups (2, -1) and (0.5, 1.5) the second has the higher sum, though the first has the best expert.
    weights_TC, experts_TC = GroupedSigmoid(num_groups=2, num_kept_groups=1)(SCORES_TX, 2)
    assert experts_TC.tolist() == [[3, 2]]
    assert weights_TC.sum().item() == pytest.approx(1)


@pytest.mark.parametrize(
    "route",
    [softmax_then_top, top_then_softmax, top_then_sigmoid, GroupedSigmoid(num_groups=2)],
    ids=["softmax_then_top", "top_then_softmax", "top_then_sigmoid", "groups"],
)
def test_a_choice_never_waits_for_the_device(route):
    # Tensors without memory can't be asked what they hold. A decode step that asked could not be recorded.
    weights_TC, experts_TC = route(torch.empty(5, 8, device="meta"), 2)
    assert (weights_TC.dtype, weights_TC.shape) == (torch.float32, (5, 2))
    assert (experts_TC.dtype, experts_TC.shape) == (torch.int64, (5, 2))


def test_a_layer_that_reads_anothers_keys_keeps_nothing():
    sizes = {"kind": FULL, "num_heads": 2, "num_kv_heads": 1, "head_size": 8}
    layers = (LayerInfo(0, **sizes), LayerInfo(1, **sizes, reads_layer=0), LayerInfo(2, **sizes, v_head_size=4))
    info = ModelInfo("x", layers, 9, 8, 64, (), None, 0)
    assert [layer.index for layer in info.cached_layers] == [0, 2]
    specs = info.cache_specs(block_size=4, element_bytes=2)
    assert [spec.layer_token_bytes for spec in specs.values()] == [32, 24]
