"""What holds for every recurrent op: whose state goes where, at every length, split and position."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_paths import on_cpu_paths

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.ssm import StateMeta

pytestmark = pytest.mark.usefixtures("path")

# Shorter than the conv width; one below, on and above the tiles of 8 tokens and the grid of 64.
LENGTHS = [1, 2, 3, 4, 7, 8, 9, 63, 64, 65, 130]
# float32 twice, summed in two orders.
SAME = {"rtol": 1e-4, "atol": 1e-4}


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_request_of_any_length_starts_from_zeros(make_op, num_tokens):
    op = make_op(num_tokens)
    op.check(op.slots(4), StateMeta.build(num_queries=[num_tokens], slots=[2], has_history=[False]))


@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_a_request_of_any_length_goes_on_from_its_state(make_op, num_tokens):
    op = make_op(num_tokens)
    op.check(op.slots(4, [2]), StateMeta.build(num_queries=[num_tokens], slots=[2], has_history=[True]))


def test_requests_of_all_kinds_share_a_batch(make_op, dtype):
    op = make_op(63, dtype)
    meta = StateMeta.build(
        num_queries=[5, 1, 0, 3, 0, 1, 2, 33, 1, 17],
        slots=[9, 2, 14, 5, 1, 12, 7, 3, 10, 4],
        has_history=[True, False, True, False, False, True, True, True, True, False],
        captures=[(7, 33, 6), (0, 2, 8), (7, 16, 11), (5, 1, 13), (7, 16, 15)],
    )
    op.check(op.slots(17, [9, 14, 12, 7, 3, 10]), meta)


def test_bfloat16_inputs_leave_states_as_exact_as_float32_does(make_op):
    op = make_op(40, torch.bfloat16)
    op.check(op.slots(3, [1]), StateMeta.build(num_queries=[40], slots=[1], has_history=[True], captures=[(0, 39, 2)]))


@pytest.mark.parametrize("has_history", [True, False])
def test_a_request_without_tokens_leaves_its_slot_alone(make_op, has_history):
    op = make_op(3)
    states = op.slots(4, [1, 2])
    before = states[1].clone()
    op.run(states, StateMeta.build(num_queries=[0, 3], slots=[1, 2], has_history=[has_history, True]))
    assert torch.equal(states[1], before)


def test_a_batch_without_tokens_does_nothing(make_op):
    op = make_op(0)
    states = op.slots(2, [1])
    before = states.clone()
    assert len(op.run(states, StateMeta.build(num_queries=[0], slots=[1], has_history=[True]))) == 0
    assert len(op.run(states, StateMeta.build(num_queries=[], slots=[], has_history=[]))) == 0
    assert torch.equal(states[1:], before[1:])


@pytest.mark.parametrize("has_history", [True, False])
def test_the_state_after_every_token_of_a_chunk_can_be_kept(make_op, has_history):
    op = make_op(19)
    states = op.slots(21, [20] if has_history else [])
    before = states[20].clone() if has_history else None
    captures = [(0, num_tokens, num_tokens) for num_tokens in range(1, 20)]
    op.run(states, StateMeta.build(num_queries=[19], slots=[20], has_history=[has_history], captures=captures))
    for num_tokens in range(1, 20):
        wanted = op.state_after(num_tokens, before)
        torch.testing.assert_close(states[num_tokens], wanted, **SAME, msg=lambda m, n=num_tokens: f"S({n}): {m}")


def test_a_state_kept_beside_a_grid_line_is_that_of_its_position(make_op):
    """In the second of two requests, whose grid begins where the first one ends."""
    op = make_op(136)
    positions = [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 131]
    captures = [(1, position, 3 + index) for index, position in enumerate(positions)]
    states = op.slots(16, [2])
    before = states[2].clone()
    op.run(states, StateMeta.build(num_queries=[5, 131], slots=[1, 2], has_history=[False, True], captures=captures))
    for _, position, slot in captures:
        torch.testing.assert_close(states[slot], op.state_after(position, before, first=5), **SAME)


def test_keeping_states_changes_no_output(make_op):
    op = make_op(50)
    options = {"num_queries": [50], "slots": [1], "has_history": [False]}
    plain, kept = op.slots(5), op.slots(5)
    wanted = op.run(plain, StateMeta.build(**options))
    got = op.run(kept, StateMeta.build(**options, captures=[(0, 13, 3), (0, 14, 2), (0, 50, 4)]))
    torch.testing.assert_close(got, wanted, **SAME)
    torch.testing.assert_close(kept[1], plain[1], **SAME)
    assert torch.equal(kept[4], kept[1])


@given(data=st.data())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_split_gives_what_the_whole_gives(make_op, path, data):
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=8), label="sizes")
    op = make_op(sum(sizes))
    whole, split = op.slots(2), op.slots(2)
    wanted = op.run(whole, StateMeta.build(num_queries=[sum(sizes)], slots=[1], has_history=[False]))
    outs, begin = [], 0
    for size in sizes:
        meta = StateMeta.build(num_queries=[size], slots=[1], has_history=[begin > 0])
        outs.append(op.run(split, meta, tokens=slice(begin, begin + size)))
        begin += size
    # The C++ computes in the order of the tokens, so there even the bits are the same.
    tolerance = {"rtol": 0, "atol": 0} if path == "native" else SAME
    torch.testing.assert_close(torch.cat(outs), wanted, **tolerance)
    torch.testing.assert_close(split[1], whole[1], **tolerance)


def test_a_request_goes_on_from_a_captured_state(make_op):
    op = make_op(30)
    states = op.slots(3)
    whole = op.run(states, StateMeta.build(num_queries=[30], slots=[1], has_history=[False], captures=[(0, 17, 2)]))
    meta = StateMeta.build(num_queries=[13], slots=[2], has_history=[True])
    torch.testing.assert_close(op.run(states, meta, tokens=slice(17, 30)), whole[17:], **SAME)
    torch.testing.assert_close(states[2], states[1], **SAME)


def test_neighbours_change_nothing(make_op, path):
    op = make_op(24)
    alone, packed = op.slots(4), op.slots(4)
    wanted = op.run(alone, StateMeta.build(num_queries=[9], slots=[1], has_history=[False]), tokens=slice(10, 19))
    got = op.run(packed, StateMeta.build(num_queries=[10, 9, 5], slots=[3, 1, 2], has_history=[False] * 3))[10:19]
    torch.testing.assert_close(got, wanted, **SAME)
    torch.testing.assert_close(packed[1], alone[1], **SAME)


def test_slots_may_lie_apart_among_other_bytes(make_op):
    op = make_op(12)
    size = op.slots(1).numel()
    arena = torch.full((4, size + 9), torch.nan, dtype=op.state_dtype)
    states = arena[:, 4 : 4 + size].unflatten(1, op.state_shape)
    op.check(states, StateMeta.build(num_queries=[12], slots=[3], has_history=[False], captures=[(0, 5, 1)]))
    assert arena[:, :4].isnan().all()
    assert arena[:, 4 + size :].isnan().all()


def test_inputs_may_be_columns_of_a_wider_tensor(make_op, dtype):
    op = make_op(12, dtype)
    for name, tensor in op.tokens.items():
        wide = torch.full((12, tensor[0].numel() + 7), torch.nan, dtype=dtype)
        op.tokens[name] = wide[:, 3:-4].unflatten(1, tensor.shape[1:])
        op.tokens[name].copy_(tensor)
    op.check(op.slots(2), StateMeta.build(num_queries=[12], slots=[1], has_history=[False]))


def test_inputs_may_be_transposed(make_op):
    op = make_op(12)
    op.tokens = {name: tensor.transpose(0, -1).contiguous().transpose(0, -1) for name, tensor in op.tokens.items()}
    op.check(op.slots(2), StateMeta.build(num_queries=[12], slots=[1], has_history=[False]))


@pytest.mark.parametrize(
    ("slots", "captures", "message"),
    [([4], [], r"slots 4 .. 4 of the step must be within \[1, 4\)"), ([1], [(0, 1, 5)], "slots 1 .. 5")],
)
@on_cpu_paths
def test_a_slot_that_does_not_exist_is_refused(make_op, slots, captures, message):
    op = make_op(2)
    meta = StateMeta.build(num_queries=[2], slots=slots, has_history=[True], captures=captures)
    with pytest.raises(ShapeError, match=message):
        op.run(op.slots(4), meta)


@pytest.mark.parametrize("slot", [0, -1])
@on_cpu_paths
def test_the_null_slot_and_those_below_are_refused(make_op, slot):
    op = make_op(2)
    meta = StateMeta.build(num_queries=[2], slots=[1], has_history=[True])
    with pytest.raises(ShapeError, match=f"slots {slot} .. {slot} of the step"):
        op.run(op.slots(4), replace(meta, slots_R=torch.tensor([slot]), known_host=None))


@on_cpu_paths
def test_a_batch_of_another_length_is_refused(make_op):
    op = make_op(2)
    with pytest.raises(ShapeError, match="meta tells of 3 tokens, the inputs have 2"):
        op.run(op.slots(4), StateMeta.build(num_queries=[3], slots=[1], has_history=[True]))


@on_cpu_paths
def test_states_that_can_not_be_updated_in_place_are_refused(make_op):
    op = make_op(2)
    states = op.slots(4).transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ShapeError, match="must be contiguous within a slot"):
        op.run(states, StateMeta.build(num_queries=[2], slots=[1], has_history=[True]))


@on_cpu_paths
def test_states_on_another_device_are_refused(make_op):
    op = make_op(2)
    with pytest.raises(ShapeError, match="is on meta, must be on cpu"):
        op.run(op.slots(4).to("meta"), StateMeta.build(num_queries=[2], slots=[1], has_history=[True]))
