"""What AttentionMeta.build makes of plain lists."""

import pytest
import torch

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.attention import AttentionMeta


def build(**changes):
    lists = {"num_queries": [3, 1], "num_keys": [6, 5], "block_tables": [[7, 2], [9, 4]], "block_size": 4}
    return AttentionMeta.build(**{**lists, **changes})


def test_query_starts_end_with_the_number_of_tokens():
    assert build().query_starts.tolist() == [0, 3, 4]


def test_slots_follow_each_requests_last_tokens():
    # Positions 3, 4, 5 of the first request, 4 of the second.
    assert build().slots_T.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 4 * 4]


def test_positions_are_those_of_each_requests_last_tokens():
    assert build().positions().tolist() == [3, 4, 5, 4]
    assert build(num_queries=[0, 2]).positions().tolist() == [3, 4]


def test_shorter_tables_are_filled_up():
    assert build(block_tables=[[7, 2], [9, 4, 5]]).block_tables_RB.tolist() == [[7, 2, 0], [9, 4, 5]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query_starts": torch.zeros(2, dtype=torch.int32)}, "query_starts has shape"),
        ({"num_keys": torch.zeros(2, dtype=torch.int64)}, "num_keys is int64"),
        ({"num_keys": torch.zeros(4, dtype=torch.int32)[::2]}, "must be contiguous"),
        ({"slots_T": torch.zeros(4, dtype=torch.int32)}, "slots_T is int32"),
        ({"block_tables_RB": torch.zeros(1, 2, dtype=torch.int32)}, "block_tables_RB has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ShapeError, match=message):
        AttentionMeta(**{**vars(build()), **change})
