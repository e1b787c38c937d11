"""How many requests fit, drawn and in a table."""

import io
import sys
from dataclasses import replace

import pytest
from rich.console import Console

from hybrid_engine.bench.plan_plot import CONTEXTS, Capacity, capacity_of, draw, table, tokens
from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.spec import FullAttentionSpec, MambaSpec, group_layers
from hybrid_engine.plan import plan_memory

SMALL = Capacity(
    memory_bytes=100_000,
    groups=("full attention", "mamba"),
    contexts=(1024, 2048, 4096),
    num_requests=(20, 10, 0),
    group_bytes=((1_000, 4_000), (6_000, 4_000), (120_000, 4_000)),
)


def text_of(capacity: Capacity) -> str:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(table(capacity, title="a model"))
    return console.export_text()


@pytest.mark.parametrize(("index", "name"), [(0, "mamba"), (1, "full attention"), (2, "full attention")])
def test_the_group_that_takes_most_binds(index, name):
    assert SMALL.binding(index) == name


def test_a_limit_binds_where_more_would_fit():
    limited = replace(SMALL, max_requests=12)
    assert [limited.binding(index) for index in range(2)] == ["most requests at once", "full attention"]
    assert [limited.num_running(index) for index in range(3)] == [12, 10, 0]


def test_what_fits_is_what_the_plan_says():
    groups = group_layers({0: FullAttentionSpec(1, 64, 2), 1: MambaSpec((64, 3), (64, 16), conv_element_bytes=2)})
    plan = plan_memory(groups, 2**24)
    names = {group.group_id: group.spec.kind for group in groups}
    found = capacity_of(plan, names, contexts=(1024, 8192), chunk_tokens=256, num_states=3)
    assert found.num_requests == tuple(
        plan.num_requests(length, chunk_tokens=256, num_states=3) for length in found.contexts
    )
    wanted = plan.request_bytes(8192, chunk_tokens=256, num_states=3)
    assert dict(zip(found.groups, found.group_bytes[1], strict=True)) == {names[key]: wanted[key] for key in wanted}
    assert found.num_requests[0] > found.num_requests[1] > 0


def test_the_table_tells_each_length_with_a_bar():
    lines = text_of(SMALL).splitlines()
    rows = {line.split("│")[1].strip(): line for line in lines if "│" in line}
    assert list(rows) == ["1k", "2k", "4k"]
    assert ("20" in rows["1k"], "80.0 %" in rows["1k"], "none" in rows["4k"]) == (True, True, True)
    assert rows["1k"].count("█") == 20 > rows["2k"].count("█") > rows["4k"].count("█") == 0


def test_the_plot_is_a_picture_by_its_name(tmp_path):
    draw(SMALL, tmp_path / "plan.png", title="a model")
    assert (tmp_path / "plan.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_the_plot_has_axes_with_units_and_says_where_none_fits(tmp_path):
    draw(SMALL, tmp_path / "new" / "plan.svg", title="a model <of> $two$ & more")
    drawn = (tmp_path / "new" / "plan.svg").read_text()
    shown = ("requests at once (log)", "a request's bytes (%)", "tokens of a request (log)", "1k", "4k", "20", "none")
    assert not [words for words in (*shown, "binds", "mamba", "full attention") if f">{words}</text>" not in drawn]
    assert "a model &lt;of&gt; $two$ &amp; more" in drawn
    assert "#010f" not in drawn, "a placeholder of the report's is no colour"


def test_nothing_that_fits_is_drawn_as_nothing(tmp_path):
    draw(replace(SMALL, num_requests=(0, 0, 0)), tmp_path / "plan.svg", title="too large")
    assert (tmp_path / "plan.svg").read_text().count(">none</text>") == 3


def test_a_file_of_another_kind_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"the plot's file is 'plan\.pdf', its name must end in \.png or \.svg"):
        draw(SMALL, tmp_path / "plan.pdf", title="")


def test_without_the_library_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="plots need matplotlib"):
        draw(SMALL, tmp_path / "plan.png", title="")


def test_lengths_go_from_1k_to_1m():
    assert (tokens(CONTEXTS[0]), tokens(CONTEXTS[-1]), tokens(1500)) == ("1k", "1M", "1,500")
