import pytest

from hybrid_engine.outputs import (
    CompletionOutput,
    Logprob,
    OutputCollector,
    RequestMetrics,
    RequestOutput,
    decode_logprobs,
)
from hybrid_engine.step_plan import TokenLogprobs


def delta(*completions, finished=False):
    return RequestOutput("r", "q", [5], list(completions), finished, RequestMetrics(arrival_time=1.0))


def completion(index, text, *, reason=None, logprobs=None, total=None):
    return CompletionOutput(index, text, [ord(letter) for letter in text], total, logprobs, reason)


def test_deltas_join_to_the_whole_output_by_index():
    collector = OutputCollector()
    collector.add(delta(completion(1, "x")))
    collector.add(delta(completion(0, "a"), completion(1, "y", reason="stop")))
    collector.add(delta(completion(0, "b", reason="length"), finished=True))
    output = collector.output()
    assert [(c.index, c.text, c.token_ids, c.finish_reason) for c in output.outputs] == [
        (0, "ab", [97, 98], "length"),
        (1, "xy", [120, 121], "stop"),
    ]
    assert output.finished


def test_logprobs_of_deltas_join_and_their_sum_is_the_last_one():
    position = {97: Logprob(-0.5, 1, "a")}
    collector = OutputCollector()
    collector.add(delta(completion(0, "a", logprobs=[position], total=-0.5)))
    collector.add(delta(completion(0, "a", logprobs=[position], total=-1.0, reason="stop")))
    (joined,) = collector.output().outputs
    assert (joined.logprobs, joined.cumulative_logprob) == ([position] * 2, -1.0)


def test_logprobs_put_the_chosen_token_first_and_name_it_once():
    found = decode_logprobs(TokenLogprobs(7, -2.0, 2, top=((9, -1.0), (7, -2.0))), str)
    assert found == {7: Logprob(-2.0, 2, "7"), 9: Logprob(-1.0, 1, "9")}
    assert list(found) == [7, 9]


@pytest.mark.parametrize(
    ("metrics", "ttft", "total"),
    [
        (RequestMetrics(1.0), None, None),
        (RequestMetrics(1.0, 1.5), 0.5, None),
        (RequestMetrics(1.0, 1.5, 3.0), 0.5, 2.0),
    ],
    ids=["waiting", "running", "done"],
)
def test_times_count_from_arrival_and_are_none_until_they_have_come(metrics, ttft, total):
    assert (metrics.ttft_seconds, metrics.total_seconds) == (ttft, total)
