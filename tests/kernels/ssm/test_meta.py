"""StateMeta: plain lists to tensors, and what can't be meant."""

from dataclasses import replace

import pytest
import torch

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.ssm import StateMeta


def build(**changes):
    options = {"num_queries": [5, 0, 3], "slots": [4, 2, 1], "has_history": [False, True, True]} | changes
    return StateMeta.build(**options)


def test_captures_come_out_in_the_order_of_the_tokens():
    meta = build(captures=[(2, 3, 7), (0, 5, 6), (2, 1, 5), (0, 2, 9)])
    assert meta.query_starts.tolist() == [0, 5, 5, 8]
    assert meta.capture_requests_C.tolist() == [0, 0, 2, 2]
    assert meta.capture_ends_C.tolist() == [2, 5, 6, 8]
    assert meta.capture_slots_C.tolist() == [9, 6, 5, 7]


def test_it_tells_tokens_and_the_range_of_slots():
    meta = build(captures=[(0, 2, 9)])
    assert (meta.host.num_tokens, meta.host.slot_range) == (8, (1, 9))


def test_a_step_of_no_requests_has_empty_tensors():
    meta = StateMeta.build(num_queries=[], slots=[], has_history=[])
    assert meta.query_starts.tolist() == [0]
    assert len(meta.slots_R) == len(meta.capture_slots_C) == meta.host.num_tokens == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"captures": [(0, 6, 9)]}, r"after 6 tokens, must be within \[1, 5\]"),
        ({"captures": [(0, 0, 9)]}, r"after 0 tokens"),
        ({"captures": [(1, 1, 9)]}, r"after 1 tokens, must be within \[1, 0\]"),
        ({"captures": [(3, 1, 9)]}, "names row 3, there are 3"),
        ({"captures": [(0, 1, 2)]}, "must all be different"),
        ({"slots": [4, 4, 1]}, "must all be different"),
        ({"slots": [4, 0, 1]}, "slot 0 is the null slot"),
        ({"captures": [(0, 1, 0)]}, "slot 0 is the null slot"),
        ({"slots": [4, 2]}, "query_starts has shape"),
        ({"has_history": [True]}, "has_history_R has shape"),
    ],
)
def test_what_can_not_be_meant_is_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        build(**changes)


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("query_starts", torch.zeros(4, dtype=torch.int64), "query_starts is int64"),
        ("slots_R", torch.zeros(3, dtype=torch.int32), "slots_R is int32"),
        ("has_history_R", torch.zeros(3), "has_history_R is float32"),
        ("capture_ends_C", torch.zeros(0, dtype=torch.int32), "capture_ends_C is int32"),
        ("capture_slots_C", torch.zeros(1, dtype=torch.int64), "capture_slots_C has shape"),
        ("slots_R", torch.zeros(6, dtype=torch.int64)[::2], "slots_R must be contiguous"),
    ],
)
def test_tensors_that_do_not_fit_each_other_are_refused(name, tensor, message):
    with pytest.raises(ShapeError, match=message):
        replace(build(), **{name: tensor})
