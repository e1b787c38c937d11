"""Triton's recurrent ops in its interpreter, quickly; the slow tests run all of the other files on it too."""

import pytest
import torch

from hybrid_engine.kernels.ssm import StateMeta, gated_rms_norm, reference
from hybrid_engine.kernels.ssm.pieces import Pieces

pytestmark = pytest.mark.usefixtures("interpreted")


def test_requests_of_all_kinds_share_a_batch_and_leave_states_on_the_way(make_op):
    op = make_op(25)
    meta = StateMeta.build(
        num_queries=[5, 1, 0, 1, 18],
        slots=[9, 2, 4, 5, 1],
        has_history=[True, False, True, True, False],
        captures=[(0, 2, 8), (3, 1, 6), (4, 8, 3), (4, 8, 7), (4, 18, 10)],
    )
    op.check(op.slots(11, [9, 4, 5]), meta)


def test_one_token_of_each_request_is_a_step(make_op, dtype):
    op = make_op(3, dtype)
    meta = StateMeta.build(
        num_queries=[1, 1, 1], slots=[3, 1, 2], has_history=[True, False, True], captures=[(2, 1, 4)]
    )
    op.check(op.slots(5, [3, 2]), meta)


def test_padding_touches_no_slot(make_op):
    op = make_op(3)
    states = op.slots(3, [1, 2])
    wanted = states.clone()
    meta = StateMeta.build(num_queries=[1], slots=[2], has_history=[True], num_padding=2)
    got = op.run(states, meta)[:1]
    alone = StateMeta.build(num_queries=[1], slots=[2], has_history=[True])
    torch.testing.assert_close(got, op.run(wanted, alone, tokens=slice(0, 1)))
    torch.testing.assert_close(states, wanted, equal_nan=True)


def test_an_exact_scan_of_several_tokens_is_that_of_the_reference(make_op, dtype):
    op = make_op(12, dtype)
    meta = StateMeta.build(
        num_queries=[7, 1, 4], slots=[5, 2, 1], has_history=[True, True, False], captures=[(0, 3, 4)], is_exact=True
    )
    op.check(op.slots(6, [5, 2]), meta)


def test_an_exact_scan_has_the_same_bits_in_any_split_and_from_a_state_kept_on_the_way(make_op):
    op = make_op(12)
    states = op.slots(4)

    def run(first: int, end: int, slot: int, *captures: tuple[int, int, int]) -> torch.Tensor:
        about = {"num_queries": [end - first], "slots": [slot], "has_history": [first > 0], "captures": captures}
        return op.run(states, StateMeta.build(**about, is_exact=True), tokens=slice(first, end))

    whole = run(0, 12, 1, (0, 5, 2))
    assert torch.equal(torch.cat([run(5, 6, 2), run(6, 12, 2)]), whole[5:])
    assert torch.equal(states[2], states[1])


@pytest.mark.parametrize("is_by_row", [False, True])
def test_pieces_of_the_delta_rule_longer_than_a_block_of_its_inverse(make_any_delta, is_by_row):
    """Keys that are alike: what is written depends on all that was written before it in the piece."""
    op = make_any_delta(75, heads=2, groups=1, chunk=40, is_by_row=is_by_row)
    op.check(op.slots(3, [1]), StateMeta.build(num_queries=[75], slots=[1], has_history=[True], captures=[(0, 50, 2)]))


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_groups_are_normed_apart(activation):
    x_TI, gate_TI, weight_I = torch.randn(3, 60), torch.randn(3, 60), torch.randn(60)
    options = {"eps": 1e-5, "group_size": 20, "norm_before_gate": False, "activation": activation}
    wanted = reference.gated_rms_norm(x_TI, gate_TI, weight_I, **options)
    torch.testing.assert_close(gated_rms_norm(x_TI, gate_TI, weight_I, **options), wanted)


def test_pieces_end_at_captures_and_leave_single_tokens_out():
    pieces = Pieces.build(
        [0, 1, 10, 10, 15], [(1, 9), (4, 8), (4, 7), (10, 6)], size=4, put=lambda array: torch.from_numpy(array)
    )
    assert pieces.bounds.tolist() == [[1, 3], [4, 0], [4, 4], [8, 2], [10, 4], [14, 1]]
    assert pieces.slots.tolist() == [8, 7, -1, 6, -1, -1]
    assert pieces.row_pieces.tolist() == [0, 0, 4, 4, 6]
