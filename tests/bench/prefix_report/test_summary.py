"""The figures of a report in words."""

import pytest
from prefix_reports import GIB, small_run

from hybrid_engine.bench.prefix_report.summary import COLUMNS, seconds, sections, size, time_unit


def test_a_row_tells_a_run_column_by_column():
    run = small_run(num_clairvoyant_tokens=750, num_recomputed_tokens=1234, num_preemptions=5, max_orphan_bytes=0)
    (section,) = sections([run])
    shown = dict(zip((name for name, _ in COLUMNS), section.rows()[0].cells, strict=True))
    assert shown == {
        "memory": "4 GiB (10 %)",
        "policy": "lru",
        "hit rate": "60.0 %",
        "of infinite": "75.0 %",
        "of clairvoyant": "80.0 %",
        "evicted": "67",
        "recomputed": "1,234",
        "TTFT p50": "500 ms",
        "p90": "2 s",
        "p99": "30 s",
        "preemptions": "5",
        "orphan bytes": "0",
    }


def test_a_bound_that_was_not_found_is_a_dash():
    (section,) = sections([small_run()])
    assert section.rows()[0].cells[4] == "-"


def test_the_best_policy_of_each_memory_is_marked_and_a_bound_is_none():
    runs = [
        small_run("lru", memory_bytes=8 * GIB, num_hit=640),
        small_run("value", memory_bytes=8 * GIB, num_hit=630),
        small_run("lru", num_hit=600),
        small_run("value", num_hit=610),
        small_run("clairvoyant", num_hit=620),
    ]
    (section,) = sections(runs)
    assert [row.is_best for row in section.rows()] == [False, True, False, True, False]


def test_a_policy_alone_is_not_called_the_best():
    (section,) = sections([small_run("lru"), small_run("lru", memory_bytes=8 * GIB)])
    assert not any(row.is_best for row in section.rows())


def test_traces_and_models_are_compared_apart():
    found = sections(
        [small_run(trace="a"), small_run(trace="b"), small_run(trace="a"), small_run(trace="a", model="m")]
    )
    assert [(section.title, len(section.runs)) for section in found] == [
        ("a · a model", 2),
        ("b · a model", 1),
        ("a · m", 1),
    ]


@pytest.mark.parametrize(
    ("num_bytes", "words"), [(0, "0 B"), (1023, "1,023 B"), (1536, "1.5 KiB"), (613 * GIB, "613 GiB")]
)
def test_sizes_in_words(num_bytes, words):
    assert size(num_bytes) == words


@pytest.mark.parametrize(("value", "words"), [(0.0, "0 ms"), (0.0123, "12.3 ms"), (9.97, "9.97 s"), (4321, "4,321 s")])
def test_durations_in_words(value, words):
    assert seconds(value) == words


@pytest.mark.parametrize(("value", "unit"), [(0, "s"), (119, "s"), (120, "min"), (10_000, "h"), (10**6, "d")])
def test_an_axis_of_time_has_a_handy_unit(value, unit):
    assert time_unit(value)[1] == unit
