"""The page of a report stands alone, has all parts, and shows names as what they are."""

import sys
from html.parser import HTMLParser

import pytest
from prefix_reports import GIB, small_report, small_run

from hybrid_engine.bench.prefix_report import page
from hybrid_engine.bench.prefix_report.page import to_html, write_html
from hybrid_engine.bench.prefix_result import Series
from hybrid_engine.errors import ConfigError

HOSTILE = """</svg><script>alert(1)</script>"><img src=x onerror='alert(2)'> $\\frac{ {{ 7 * 7 }} &lt;"""
PARTS = ["summary", "hit-rate", "misses", "bytes", "ttft"]


class Elements(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def plain() -> str:
    return to_html(small_report(small_run("lru"), small_run("value", num_hit=650)))


def test_the_page_loads_nothing(plain):
    elements = Elements(plain)
    assert not {"script", "link", "img", "iframe", "object", "image"} & set(elements.tags)
    places = [value for name, value in elements.attributes if name.endswith("href") or name in ("src", "srcset")]
    assert all(place.startswith("#") for place in places)
    assert not [value for _, value in elements.attributes if "url(" in value and "url(#" not in value]
    assert "http" not in plain
    assert "@import" not in plain


@pytest.mark.parametrize("part", PARTS)
def test_the_page_has_every_part_with_words_on_how_to_read_it(plain, part):
    section = plain.partition(f'<section id="{part}">')[2].partition("</section>")[0]
    assert "<h2>" in section
    assert len(section.partition("<p>")[2].partition("</p>")[0]) > 80
    assert ("<table>" if part == "summary" else "<svg") in section


def test_there_is_a_plot_for_each_run_or_memory(plain):
    # Misses and bytes of two runs, hit rates and times of one memory size.
    assert plain.count("<svg") == 2 + 2 + 1 + 1


def test_plots_have_the_colours_of_the_page_alone(plain):
    drawn = plain[plain.index("<svg") :]
    assert "#010f" not in drawn
    assert "var(--series-0)" in drawn
    assert not [value for _, value in Elements(drawn).attributes if "fill: #" in value or "stroke: #" in value]


def test_a_name_is_text_whatever_it_holds():
    run = small_run(HOSTILE, trace=HOSTILE, model=HOSTILE)
    run.settings.hardware = HOSTILE
    run.series.groups[0].name = HOSTILE
    run.totals.missed_tokens[HOSTILE] = 1
    run.series.missed_tokens[HOSTILE] = [1, 0, 0, 0]
    report = small_report(run)
    report.title = report.command = report.machine[HOSTILE] = HOSTILE
    elements = Elements(to_html(report))
    assert not {"script", "img"} & set(elements.tags)
    assert "onerror" not in dict(elements.attributes)
    # Title twice, command, machine twice, model, clock, row, and a legend and a caption at least.
    assert elements.text.count(HOSTILE) > 10


def test_the_same_report_gives_the_same_page(plain):
    assert to_html(small_report(small_run("lru"), small_run("value", num_hit=650))) == plain


def test_names_inside_plots_are_each_their_own(plain):
    names = [value for name, value in Elements(plain[plain.index("<svg") :]).attributes if name == "id"]
    inside_svg = [name for name in names if name not in PARTS]
    assert len(inside_svg) == len(set(inside_svg)) > 0


def test_traces_stand_apart_and_share_a_legend_where_policies_are_the_same():
    text = to_html(small_report(small_run(trace="one"), small_run(trace="two")))
    hit_rates = text.partition('<section id="hit-rate">')[2].partition("</section>")[0]
    assert (hit_rates.count('<ul class="keys">'), hit_rates.count("<svg")) == (1, 2)
    assert text.count("<h3>one · a model</h3>") == 3


@pytest.mark.parametrize(("policies", "num_lines"), [(("lru",), 1), (("lru", "value"), 2)])
def test_memories_stand_below_each_other_where_policies_are_to_be_compared(policies, num_lines):
    runs = [small_run(policy, memory_bytes=size * GIB) for size in (4, 8) for policy in policies]
    misses = to_html(small_report(*runs)).partition('<section id="misses">')[2].partition("</section>")[0]
    assert misses.count('<div class="panels">') == num_lines


def test_seconds_are_called_what_they_are():
    measured = small_run("value")
    measured.settings.is_measured = True
    assert "measured" not in Elements(to_html(small_report())).text
    assert "Seconds of measured runs" in to_html(small_report(measured))


def test_a_run_without_samples_or_times_is_drawn():
    empty = small_run(ttft_s=type(small_run().totals.ttft_s)(), missed_tokens={})
    empty.series = Series()
    assert to_html(small_report(empty)).count("<svg") == 4


def test_a_report_without_runs_says_so():
    report = small_report()
    report.runs = []
    assert "The report has no runs." in to_html(report)


def test_only_so_many_runs_are_drawn_and_all_are_in_the_table(monkeypatch):
    monkeypatch.setattr(page, "MAX_PANELS", 1)
    text = to_html(small_report(small_run("lru"), small_run("value"), small_run("lru", memory_bytes=8 * GIB)))
    assert text.count("<svg") == 1 + 1 + 1 + 1
    assert text.count("<td>4 GiB (10 %)</td>") == 2
    assert "Of 3 runs, the first 1 are drawn." in Elements(text).text


def test_the_page_goes_to_a_file(tmp_path):
    path = tmp_path / "new" / "report.html"
    write_html(small_report(), path)
    assert path.read_text(encoding="utf-8").endswith("</html>")


def test_without_the_library_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"plots need matplotlib: pip install 'hybrid-engine\[bench\]'"):
        to_html(small_report())


@pytest.mark.slow
def test_a_report_of_many_long_runs_stays_small():
    memories = [size * GIB for size in (4, 8, 16)]
    runs = [
        small_run(policy, trace=trace, memory_bytes=size)
        for trace in ("a", "b", "c", "d")
        for policy in ("lru", "flops", "value")
        for size in memories
    ]
    for run in runs:
        run.series.time_s = [100.0 * index for index in range(400)]
        for counts in (run.series.hit_tokens, run.series.last_tokens, *run.series.missed_tokens.values()):
            counts[:] = [(7919 * index) % 1000 for index in range(400)]
        for group in run.series.groups:
            for sizes in (group.held_bytes, group.cached_bytes, group.empty_bytes):
                sizes[:] = [(7919 * index) % GIB for index in range(400)]
        run.series.unowned_bytes = [GIB] * 400
    assert len(to_html(small_report(*runs))) < 5_000_000
