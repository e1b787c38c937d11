"""`bench engine`, `weights` and `kernels`: what is timed is what the figures say; times are no test's matter."""

import torch

from hybrid_engine import tiny_hybrid
from hybrid_engine.bench import steps, weights


def test_the_weights_of_a_step_are_those_of_all_linear_layers_once_the_head_first():
    bench = steps.StepBench(tiny_hybrid.find_model(tiny_hybrid.NAME), 1)
    model = bench._engine.runner.model
    assert bench.weights[0] is model.head.packed
    sizes = sorted(packed.num_outputs * packed.num_inputs for packed in bench.weights)
    wanted = [weight.num_elements for weight, _ in model.weights() if weight.attribute == "packed"]
    assert sizes == sorted(wanted)


def test_steps_and_prefill_are_reported_with_their_goals():
    model = tiny_hybrid.find_model(tiny_hybrid.NAME)
    decoding, prefill = steps.run(model=model, num_rounds=1, num_threads=1, prompt_tokens=20, prefill_tokens=40)
    goals = [figure.at_most for figure in decoding.figures if figure.at_most is not None]
    assert goals == list(steps.DECODE_GOALS.values())
    share = prefill.figures[-1]
    assert share.at_least == steps.LEAST_PREFILL_SHARE
    rates = [figure.values[0] for figure in prefill.figures[:2]]
    torch.testing.assert_close(share.values[0], rates[0] / rates[1])


def test_weights_in_8_bits_have_the_floor_of_the_bytes_held_and_no_goals():
    model = tiny_hybrid.find_model(tiny_hybrid.NAME)
    plain, int8 = (steps.StepBench(model, 1, quantization) for quantization in (None, "int8"))
    assert int8.weight_bytes == sum(packed.num_bytes for packed in int8.weights)
    assert 0.5 < int8.weight_bytes / plain.weight_bytes < 0.65  # scales and corrections, of rows that are short
    reports = steps.run(
        model=model, num_rounds=1, num_threads=1, quantization="int8", prompt_tokens=20, prefill_tokens=40
    )
    decoding, prefill = reports
    assert all(figure.at_most is None is figure.at_least for figure in (*decoding.figures, *prefill.figures))
    assert all("bfloat16, weights in int8, 1 threads" in report.notes[0] for report in (decoding, prefill))


def test_each_kind_of_weights_that_a_cpu_has_is_timed_and_scored(monkeypatch):
    monkeypatch.setattr(weights, "HEAD", (512, 64))
    monkeypatch.setattr(weights, "SHAPES", {"qkv": (64, 64)})
    model = tiny_hybrid.find_model(tiny_hybrid.NAME)
    speeds, perplexities = weights.run(model=model, num_rounds=1, num_threads=1, num_windows=1)
    named = [figure.name for figure in perplexities.figures[::2]]
    assert [name.partition(",")[0] for name in named] == ["bfloat16", "int8", "w8a8"]
    ratios = [figure.values[0] for figure in perplexities.figures[1::2]]
    assert ratios[0] == 1
    assert all(0.9 < ratio < 1.1 for ratio in ratios), ratios
    assert len(speeds.figures) == 3 * (1 + 2 * len(weights.BATCHES))


def test_a_prefill_ends_with_its_first_token_and_decoding_is_timed_behind_it():
    bench = steps.StepBench(tiny_hybrid.find_model(tiny_hybrid.NAME), 1)
    assert len(bench._steps(1, 40, 1)) == 1
    assert len(bench._steps(3, 40, steps.DECODE_STEPS)) >= steps.DECODE_STEPS
