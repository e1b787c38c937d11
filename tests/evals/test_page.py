"""The page: all figures of one report or several, in one file that loads nothing."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.report import Cell, Report, Score, Work

pytest.importorskip("matplotlib", reason="the evals extra isn't installed: pip install -e '.[evals]'")

from hybrid_engine.evals.page import to_html, write_page


def make_report(name: str, dtype: str, value: float) -> Report:
    samples = ({"key": "needle_map@1024#0", "task": "needle_map", "score": 0.0, "answer": "<b>", "references": ["71"]},)
    return Report(
        name=name,
        settings={
            "model": "jamba",
            "dtype": dtype,
            "lengths": [1024, 2048],
            "tasks": {"needle_map": "a fact in prose"},
        },
        scores=(
            Score("needle_map", 1024, 11, "score", value, 0.31, 0.83, "Wilson"),
            Score("needle_map", 2048, 11, "score", 1.0, 0.74, 1.0, "Wilson"),
            Score("perplexity", 1024, 2, "perplexity", 23.456, 20.1, 27.2, "bootstrap"),
        ),
        cells=(Cell("needle_map", 1024, 0.5, 1, 0.0), Cell("needle_map", 2048, 0.5, 1, 1.0)),
        work=Work(40_000, 9_000, 9_100, 200, 2.5, 40_000, 12.5, 23, 24),
        num_samples=24,
        num_resumed=7,
        samples=samples,
    )


class Checker(HTMLParser):
    """Notes elements that are not closed, and what the page would load."""

    EMPTY = frozenset({"meta", "br", "link", "img"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.open += [] if tag in self.EMPTY else [tag]
        self.loads += [value for name, value in attrs if name in ("src", "href", "xlink:href") and value[0] != "#"]

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes nothing"


def text_of(html: str) -> str:
    """Return what a reader sees, without the plots."""
    body = re.sub(r"<svg.*?</svg>", "", html[html.index("<body") :], flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", body))


@pytest.fixture(scope="module")
def both() -> str:
    return to_html([make_report("first", "float32", 0.59), make_report("second", "bfloat16", 0.62)])


def test_the_page_is_well_formed_and_loads_nothing(both):
    checker = Checker()
    checker.feed(both)
    assert (checker.open, checker.loads) == ([], [])


def test_scores_stand_with_their_intervals(both):
    text = text_of(both)
    assert "needle_map a fact in prose first 59 31&ndash;83 100 74&ndash;100" in text
    assert "second 62 31&ndash;83" in text
    assert "23.46 20.1&ndash;27.2" in text


def test_settings_in_which_reports_differ_are_marked(both):
    marked = re.findall(r'<tr class="differs"><th scope="row">([^<]+)', both)
    assert marked == ["dtype"]


def test_a_heat_map_shows_depth_and_length_of_each_report(both):
    assert both.count('<figure class="map">') == 2
    assert '<td style="--v: 0">0</td><td style="--v: 100">100</td>' in both


def test_each_task_has_a_plot_that_says_what_it_shows(both):
    assert 'aria-label="needle_map: score by length"' in both
    assert 'aria-label="perplexity: perplexity by length"' in both
    assert not re.search(r"#010f\w\w", both)


def test_names_inside_the_plots_are_used_once(both):
    names = re.findall(r' id="([^"]+)"', both)
    assert len(names) == len(set(names))


def test_tokens_and_seconds_are_set_against_a_run_without_reuse(both):
    text = text_of(both)
    assert "prompt tokens asked 40,000 unique among those sent together 9,000 computed 9,100" in text
    assert "seconds 2.5 seconds without reuse 12.5" in text
    assert "Answers the same with and without reuse: 23 of 24" in text


def test_answers_are_shown_as_text_whatever_they_hold(both):
    assert "&lt;b&gt;" in both


def test_no_report_makes_no_page(tmp_path):
    with pytest.raises(ConfigError, match="there is no report"):
        write_page([], tmp_path / "page.html")
