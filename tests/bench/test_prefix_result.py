"""Reports of prefix benchmarks go out as JSON and come back as they were."""

import json

import pytest

from hybrid_engine.bench.prefix_result import (
    GroupSeries,
    PrefixReport,
    PrefixRun,
    RunSettings,
    Seconds,
    Series,
    Totals,
    read_report,
)
from hybrid_engine.errors import TraceError


def small_report() -> PrefixReport:
    totals = Totals(num_prompt_tokens=100, num_hit_tokens=40, num_infinite_tokens=80, ttft_s=Seconds(0.5, 1.0, 2.0))
    series = Series(time_s=[1.0], missed_tokens={"evicted": [3]}, groups=[GroupSeries("mamba", [1], [2], [3])])
    return PrefixReport("a title", [PrefixRun(RunSettings("a trace", "a model", "lru", 2**30), totals, series)])


def test_a_report_comes_back_from_json_as_it_was():
    assert read_report(small_report().to_json()) == small_report()


def test_shares_are_told_from_the_totals():
    totals = small_report().runs[0].totals
    assert (totals.hit_rate, totals.share_of_infinite, totals.share_of_clairvoyant) == (0.4, 0.5, None)


def test_where_nothing_could_be_hit_everything_was():
    assert (Totals().share_of_infinite, Totals(num_clairvoyant_tokens=0).share_of_clairvoyant) == (1.0, 1.0)


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("format",), "other", "its format must be"),
        (("runs",), None, "runs is None, must be a list"),
        (("runs", 0, "totals", "num_wishes"), 3, "run 0, totals: num_wishes is not known"),
        (("runs", 0, "series", "groups", 0), {}, "a group: name is missing"),
        (("runs", 0, "settings"), 7, "settings: it is 7, must be an object"),
    ],
)
def test_what_is_no_report_is_refused_with_its_place(path, value, named):
    values = json.loads(small_report().to_json())
    inner = values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with pytest.raises(TraceError, match=named):
        read_report(json.dumps(values))


def test_what_is_no_json_is_refused():
    with pytest.raises(TraceError, match=r"report\.json: no valid JSON"):
        read_report("{", source="report.json")
