"""What is particular to the gated delta rule; what holds for every recurrent op is in test_states.py."""

import pytest
import torch
from kernel_paths import on_cpu_paths
from torch.nn import functional as F
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from hybrid_engine.errors import ShapeError
from hybrid_engine.kernels.ssm import StateMeta, gated_delta_rule

pytestmark = pytest.mark.usefixtures("path")

NEAR = {"rtol": 1e-4, "atol": 1e-4}
"""float32, summed in another order."""


def one_request(num_tokens: int, *, has_history: bool = True) -> StateMeta:
    return StateMeta.build(num_queries=[num_tokens], slots=[1], has_history=[has_history])


@pytest.mark.parametrize(("key_size", "size"), [(1, 1), (5, 3), (16, 16), (20, 33), (64, 128), (130, 48)])
@pytest.mark.parametrize("is_by_row", [False, True])
def test_states_of_any_shape(make_any_delta, key_size, size, is_by_row, dtype):
    op = make_any_delta(21, dtype, heads=4, key_size=key_size, size=size, is_by_row=is_by_row)
    op.check(op.slots(3, [1]), one_request(21))


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_it_is_the_rule_of_transformers(make_any_delta, num_tokens):
    op = make_any_delta(num_tokens, beta_scale=2.0, chunk=64)
    states = op.slots(2, [1])
    before_HND = states[1].clone()
    tokens, weights = op.tokens, op.weights
    q, k, v, dt, b = (tokens[name].unsqueeze(0) for name in ("q_TGN", "k_TGN", "v_THD", "dt_THN", "b_TH"))
    decay = weights["A_H"] * F.softplus(dt[..., 0] + weights["dt_bias_HN"][:, 0])
    wanted, after_HND = torch_recurrent_gated_delta_rule(
        q.repeat_interleave(3, 2),
        k.repeat_interleave(3, 2),
        v,
        decay,
        2 * b.sigmoid(),
        initial_state=before_HND[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(op.run(states, one_request(num_tokens)), wanted[0], **NEAR)
    torch.testing.assert_close(states[1], after_HND[0], **NEAR)


def test_decays_alike_in_all_rows_are_one_decay_a_head(make_any_delta):
    op = make_any_delta(40)
    one, many = op.slots(2), op.slots(2)
    wanted = op.run(one, one_request(40, has_history=False))
    op.tokens["dt_THN"] = op.tokens["dt_THN"].repeat(1, 1, 20)
    op.weights["dt_bias_HN"] = op.weights["dt_bias_HN"].repeat(1, 20)
    torch.testing.assert_close(op.run(many, one_request(40, has_history=False)), wanted, **NEAR)
    torch.testing.assert_close(many[1], one[1], **NEAR)


def test_a_key_that_comes_again_and_again_holds_its_last_value(make_any_delta):
    """Without decay and with all of the difference written, what was there before is gone, however often."""
    op = make_any_delta(100, heads=1, groups=1, has_bias=False, chunk=64)
    op.tokens["k_TGN"] = op.tokens["k_TGN"][:1].repeat(100, 1, 1)
    op.tokens["q_TGN"] = op.tokens["k_TGN"]
    op.tokens["b_TH"] += 60
    op.weights["A_H"] = torch.zeros(1)
    out_THD = op.run(op.slots(2), one_request(100, has_history=False))
    torch.testing.assert_close(out_THD, op.tokens["v_THD"] * 20**-0.5, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("is_by_row", [False, True])
@pytest.mark.parametrize("shift", [-60.0, 30.0, 300.0])
def test_decays_far_from_one_stay_exact(make_any_delta, shift, is_by_row):
    op = make_any_delta(75, is_by_row=is_by_row, chunk=64)
    op.tokens["dt_THN"][::7] += shift
    op.check(states := op.slots(2, [1]), one_request(75))
    assert states[1].isfinite().all()


def test_keys_and_queries_of_zeros_write_and_read_nothing(make_any_delta):
    op = make_any_delta(20)
    op.tokens["k_TGN"][5:] = 0
    op.tokens["q_TGN"][15:] = 0
    op.check(op.slots(2, [1]), one_request(20))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q_TGN": torch.zeros(4, 2, 3)}, "k_TGN has shape"),
        ({"v_THD": torch.zeros(4, 6, 5).half()}, "v_THD is float16"),
        ({"dt_THN": torch.zeros(4, 6, 3)}, "dt_THN has shape"),
        ({"b_TH": torch.zeros(4, 5)}, "b_TH has shape"),
        ({"A_H": torch.zeros(5)}, "A_H has shape"),
        ({"dt_bias_HN": torch.zeros(6, 2)}, "dt_bias_HN has shape"),
        ({"state_SHND": torch.zeros(2, 6, 5, 2)}, "state_SHND has shape"),
        ({"state_SHND": torch.zeros(2, 6, 2, 5).bfloat16()}, "state_SHND is bfloat16"),
        ({"q_TGN": torch.zeros(4, 4, 2), "k_TGN": torch.zeros(4, 4, 2)}, "6 heads can't share 4 groups"),
        ({"chunk": 0}, "chunk is 0"),
    ],
)
@on_cpu_paths
def test_tensors_that_do_not_fit_are_refused(changes, message):
    inputs = {
        "q_TGN": torch.zeros(4, 3, 2),
        "k_TGN": torch.zeros(4, 3, 2),
        "v_THD": torch.zeros(4, 6, 5),
        "dt_THN": torch.zeros(4, 6, 1),
        "b_TH": torch.zeros(4, 6),
        "A_H": torch.zeros(6),
        "state_SHND": torch.zeros(2, 6, 2, 5),
    }
    gated_delta_rule(**inputs, meta=one_request(4))
    with pytest.raises(ShapeError, match=message):
        gated_delta_rule(**inputs | changes, meta=one_request(4))
