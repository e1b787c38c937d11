"""What the plots are drawn from."""

import re

import pytest
from prefix_reports import GIB, small_run

from hybrid_engine.bench.prefix_report import plots
from hybrid_engine.bench.prefix_report.drawing import style
from hybrid_engine.bench.prefix_report.summary import sections


def test_missed_shares_are_of_the_prompt_tokens_of_their_time():
    ends, shares = plots._missed_shares(small_run().series)
    assert ends == [100.0, 200.0, 300.0, 400.0]
    assert shares["never_seen"] == pytest.approx([99.6, 20.0, 8.0, 100 * 10 / 261])
    assert shares["evicted"] == pytest.approx([0, 19.6, 11.6, 0])


def test_a_reason_that_never_held_is_not_drawn():
    assert list(plots._missed_shares(small_run().series)[1]) == ["evicted", "never_seen"]


def test_more_samples_than_there_is_room_for_are_added_up():
    series = small_run().series
    series.time_s = [float(index) for index in range(130)]
    series.hit_tokens, series.last_tokens = [9] * 130, [1] * 130
    series.missed_tokens = {"evicted": [0, 10, 20] * 43 + [30]}
    ends, shares = plots._missed_shares(series)
    assert (len(ends), ends[0], ends[-1]) == (44, 2.0, 129.0)
    assert shares["evicted"][:2] == [50.0, 50.0]
    assert shares["evicted"][-1] == 75.0


def test_the_axis_of_misses_leaves_out_what_the_first_calls_miss_and_nothing_usual():
    run = small_run()
    run.series.time_s = [float(index) for index in range(60)]
    run.series.hit_tokens, run.series.last_tokens = [0] + [80] * 59, [0] * 60
    run.series.missed_tokens = {"never_seen": [100] + [20] * 59}
    assert plots.missed_top([run]) == pytest.approx(25)


def test_times_are_drawn_in_full_where_they_were_kept():
    run = small_run(ttft_quantiles_s=[0.1, 0.5, 30.0])
    assert plots._distribution(run) == ([0, 50, 100], [0.1, 0.5, 30.0])
    assert plots._distribution(small_run()) == ([50, 90, 99], [0.5, 2.0, 30.0])


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.4, 6, [0.5, 1, 2, 5]),
        (0.05, 60, [0.1, 0.3, 1, 3, 10, 30]),
        (0.001, 2000, [0.001, 0.01, 0.1, 1, 10, 100, 1000]),
    ],
)
def test_ticks_of_times_are_round_and_few(low, high, ticks):
    assert plots._log_ticks(low, high) == pytest.approx(ticks)


def test_axes_are_labelled_with_units():
    (section,) = sections([small_run(), small_run(memory_bytes=8 * GIB)])
    with style():
        drawn = [
            plots.hit_rate_over_memory(section),
            plots.misses_over_time(small_run(), top=50),
            plots.bytes_over_time(small_run()),
            plots.ttft_distribution([small_run()], ["lru"], limits=(0.1, 40)),
        ]
    texts = [set(re.findall(r"<text[^>]*>([^<]*)</text>", svg)) for svg in drawn]
    assert {"prompt tokens hit (%)", "cache memory (logarithmic)", "4 GiB", "8 GiB"} <= texts[0]
    assert {"prompt tokens missed (%)", "time (min)"} <= texts[1]
    assert {"memory (GiB)", "time (min)"} <= texts[2]
    assert {"calls (%)", "time to first token (s, logarithmic)", "0.3"} <= texts[3]


def test_memory_sizes_that_are_close_together_share_a_tick():
    (section,) = sections([small_run(memory_bytes=size) for size in (4 * GIB, 4 * GIB + 1, 64 * GIB)])
    with style():
        drawn = plots.hit_rate_over_memory(section)
    assert drawn.count(">4 GiB</text>") == 1
