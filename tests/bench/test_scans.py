"""What the benchmark of scans compares computes the same."""

import torch

from hybrid_engine.bench import scans
from hybrid_engine.kernels.ssm import StateMeta, reference

BFLOAT16_LOOP = 0.05
"""Of the largest output: transformers rounds the states to bfloat16 before it sums them up."""


def test_transformers_loop_computes_what_our_scan_does():
    torch.manual_seed(0)
    scan = scans.mamba1(40, channels=48)
    states_SIN = torch.zeros(2, *scan.state_shape)
    meta = StateMeta.build(num_queries=[40], slots=[1], has_history=[False], captures=())
    out_TI = scan.ours(**scan.operands, state_SIN=states_SIN, meta=meta).float()
    theirs_1IT, last_1IN = scan.peer()
    torch.testing.assert_close(out_TI, theirs_1IT[0].T.float(), rtol=0, atol=BFLOAT16_LOOP * out_TI.abs().max().item())
    torch.testing.assert_close(states_SIN[1], last_1IN[0], rtol=0, atol=BFLOAT16_LOOP * last_1IN.abs().max().item())


def test_a_scan_of_the_bench_is_the_one_that_its_reference_computes():
    scan = scans.mamba1(24, channels=32)
    outputs = []
    for run in (scan.ours, scan.torchs, reference.mamba1_scan):
        states_S = torch.zeros(scans.NUM_SLOTS, *scan.state_shape)
        operands = {**scan.operands, scan.state_name: states_S}
        outputs.append(run(**operands, meta=scans.StateMeta.build(num_queries=[24], slots=[1], has_history=[True])))
    torch.testing.assert_close(outputs[0], outputs[2], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(outputs[1], outputs[2], rtol=2e-2, atol=2e-2)


def test_states_are_kept_where_the_bench_says():
    (report,) = scans.run(num_rounds=1, num_threads=1, num_tokens=16)
    goals = {figure.name.strip(): (figure.at_most, figure.at_least) for figure in report.figures}
    assert goals["with states kept on the way / without"] == (scans.MOST_CAPTURE_RATIO, None)
    assert goals["transformers' loop over tokens / ours"] == (None, scans.LEAST_LOOP_RATIO)
    assert len(report.figures) == 10, "three of each, and Mamba-1 beside transformers"
