"""Runs that are compared: policies, memory sizes, who knows the future, real weights."""

import os
import resource
from pathlib import Path

import pytest
from small_traces import block_row, call, user

from hybrid_engine import cli, tiny_hybrid
from hybrid_engine.bench.future import Future
from hybrid_engine.bench.geometry import CONFIGS, describe
from hybrid_engine.bench.measured import MeasuredRunner, load
from hybrid_engine.bench.prefix_bench import Bench, compare, find_geometry, parse_memory
from hybrid_engine.bench.prefix_result import RunSettings, read_report
from hybrid_engine.bench.prefix_run import UNLIMITED, ModelledRunner, Run, make_coordinator, survey
from hybrid_engine.bench.workload import BlockPrompt, TokenPrompt, WorkItem
from hybrid_engine.bench.workload_reading import read_workload
from hybrid_engine.errors import ConfigError

GIB = 2**30
TRACES_VARIABLE = "HYBRID_ENGINE_TRACES"


def text(session: str, *parts: int, answer: int = 4, **when) -> WorkItem:
    """A call whose prompt is so many copies of 64 tokens each, one part after the other."""
    pieces = tuple([part * 100 + i for i in range(64)] for part in parts)
    return WorkItem(session, TokenPrompt(pieces), answer, [7] * answer, **when)


class Second:
    """A clock of one second a step."""

    def seconds(self, positions, num_new, num_sampled):
        return 1.0


def run(items: list[WorkItem], *, memory_bytes: int = UNLIMITED, recorded=None, **settings):
    given = RunSettings("t", "jamba", "lru", memory_bytes, **({"concurrency": 1, "pace": "fast"} | settings))
    geometry = describe("jamba", CONFIGS["jamba-1.5-mini"], block_size=16)
    coordinator = make_coordinator(geometry, given, survey(items))
    return Run(items, given, coordinator, ModelledRunner(Second()), recorded=recorded).run()


def test_the_first_token_comes_with_the_step_that_computes_the_prompts_end():
    # 192 tokens in steps of 100; the second call waits for a place in the step.
    found = run([text("a", 1, 2, 3, answer=3)], step_tokens=100)
    assert (found.totals.ttft_s.p50, found.totals.makespan_s, found.totals.num_steps) == (2.0, 4.0, 4)


def test_think_times_are_part_of_the_makespan_only_where_the_pace_is_kept():
    items = [text("a", 1), text("a", 1, 2, think_s=50.0)]
    spans = [run(items, pace=pace).totals.makespan_s for pace in ("fast", "trace")]
    assert spans == [8.0, 58.0]


def test_every_prompt_token_is_accounted_for_in_totals_and_samples():
    found = run([text("a", 1), text("a", 1, 2), text("b", 1, 3), text("b", 9)])
    totals, series = found.totals, found.series
    parts = totals.num_hit_tokens + totals.num_last_tokens + sum(totals.missed_tokens.values())
    assert parts == totals.num_prompt_tokens == 6 * 64
    assert (sum(series.hit_tokens), series.num_requests[-1]) == (totals.num_hit_tokens, 4)
    assert totals.max_orphan_bytes == 0


def test_the_bytes_of_all_groups_and_of_none_are_the_memory_at_every_sample():
    series = run([text("a", 1), text("a", 1, 2), text("b", 1, 3)], memory_bytes=GIB // 2).series
    for index in range(len(series.time_s)):
        owned = sum(
            sizes[index]
            for group in series.groups
            for sizes in (group.held_bytes, group.cached_bytes, group.empty_bytes)
        )
        assert GIB // 2 * 0.9 < owned + series.unowned_bytes[index] <= GIB // 2


def test_many_samples_become_fewer_and_keep_the_sums():
    found = run([text(str(index), index, answer=1) for index in range(900)], concurrency=8)
    series = found.series
    assert 200 <= len(series.time_s) <= 401
    assert series.num_requests[-1] <= 900
    assert sum(series.last_tokens) == series.num_requests[-1]
    assert series.time_s == sorted(series.time_s)


def test_a_prompt_that_can_never_fit_is_refused_and_its_session_goes_on():
    items = [text("a", *range(80)), text("a", 1)]
    found = run(items, memory_bytes=64 * 2**20)
    assert (found.totals.num_refused, found.totals.num_requests) == (1, 1)


def test_the_future_is_where_calls_were_hit_and_moves_on_as_they_come():
    future = Future()
    run([text("a", 1), text("a", 1, 2), text("b", 1, 3)], recorded=future)
    (key,) = {future.key_of("a", 1), future.key_of("b", 0)}
    assert [call for _, call in future.uses_of(key)] == [("a", 1), ("b", 0)]
    first, second = future.uses_of(key)
    assert (future.num_calls_until(first), future.num_calls_until(second)) == (2, 3)
    future.pass_call(("a", 0))
    future.pass_call(("a", 1))
    assert future.has_passed(first)
    assert future.num_calls_until(second) == 1
    assert list(future.uses_of(key)) == [second]
    future.pass_call(("b", 0))
    assert list(future.uses_of(key)) == []


def test_who_knows_the_future_keeps_what_comes_again():
    # A loop over three prompts with place for two: what was used longest ago is what comes next.
    items = [text(f"{turn} {name}", name, name + 10, name + 20) for turn in range(6) for name in (1, 2, 3)]
    bench = Bench("loop", items, memories=("96MiB",), policies=("lru",), concurrency=1, pace="fast")
    (found,) = compare(bench).runs
    assert (found.totals.num_hit_tokens, found.totals.num_clairvoyant_tokens) == (0, 8 * 176)
    assert found.totals.num_clairvoyant_tokens <= found.totals.num_infinite_tokens


def test_the_working_set_is_every_token_once_and_what_going_on_from_each_call_takes():
    geometry = describe("jamba", CONFIGS["jamba-1.5-mini"], block_size=16)
    needs = survey([text("a", 1), text("b", 1, 2)])
    assert needs.num_tokens == 64 + 3 + 64 + 3
    assert needs.working_set_bytes(geometry) == needs.num_tokens * 16_384 + 2 * geometry.state_bytes


def test_memory_is_a_size_or_a_share_of_the_working_set():
    assert parse_memory("2GiB", 100) == (2 * GIB, None)
    assert parse_memory(" 25% ", 1000) == (250, 0.25)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: parse_memory("x%", 1), "'x%' is no share of the working set, must be like '25%'"),
        (lambda: parse_memory("0%", 1), "out of range"),
        (
            lambda: Bench("t", [], policies=("luck",)),
            "policy is 'luck', must be one of valued, lru, flop_aware, clairvoyant",
        ),
        (lambda: Bench("t", [], pace="slow"), "pace is 'slow', must be trace or fast"),
        (lambda: Bench("t", [], concurrency=0), "concurrency is 0"),
        (lambda: Bench("t", [], step_tokens=0), "step_tokens is 0"),
        (lambda: find_geometry("gpt-9", block_size=16), "model is 'gpt-9', must be one of jamba-1.5-mini"),
        (lambda: survey([text("a", 1), WorkItem("b", BlockPrompt(64, ((1, 1),), 64), 1)]), "known by different things"),
        (
            lambda: compare(Bench("t", [WorkItem("b", BlockPrompt(64, ((1, 1),), 64), 1)], block_size=16)),
            "block_size is 16, must be a multiple of 64",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_blocks_may_be_a_multiple_of_those_that_a_trace_knows():
    items = [WorkItem(name, BlockPrompt(256, ((1, 4),), 64), 1) for name in "ab"]
    (found,) = compare(
        Bench("t", items, memories=("10GiB",), policies=("lru",), block_size=128, with_clairvoyant=False)
    ).runs
    assert found.totals.num_hit_tokens == 128


@pytest.fixture(scope="module")
def tiny_model():
    return load(tiny_hybrid.find_model(tiny_hybrid.NAME))


def test_a_measured_run_hits_what_a_modelled_one_does_and_says_how_long_it_took(tiny_model):
    items = [text("a", 1, answer=3), text("a", 1, 2, answer=2), text("b", 1, answer=2)]
    items = [
        WorkItem(each.session, TokenPrompt(tuple([t % 50 for t in p] for p in each.prompt.pieces)), 2, [3, 4])
        for each in items
    ]
    model = str(tiny_hybrid.find_model(tiny_hybrid.NAME))
    bench = Bench(
        "t", items, model=model, memories=("16MiB",), policies=("lru",), concurrency=1, with_clairvoyant=False
    )
    (modelled,) = compare(bench).runs
    (measured,) = compare(bench, make_runner=lambda coordinator: MeasuredRunner(tiny_model, coordinator)).runs
    assert measured.totals.num_hit_tokens == modelled.totals.num_hit_tokens > 0
    assert 0 < measured.totals.ttft_s.p50 < measured.totals.makespan_s
    assert (measured.settings.is_measured, modelled.settings.is_measured) == (True, False)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        (WorkItem("a", BlockPrompt(64, ((1, 1),), 64), 1), "a model can't compute prompts of which only"),
        (WorkItem("a", TokenPrompt(([1, 10**7],)), 1), "a prompt has token 10,000,000, the model's vocabulary has"),
    ],
)
def test_a_model_computes_only_tokens_that_it_knows(tiny_model, item, message):
    model = str(tiny_hybrid.find_model(tiny_hybrid.NAME))
    bench = Bench("t", [item], model=model, memories=("16MiB",), with_clairvoyant=False)
    with pytest.raises(ConfigError, match=message):
        compare(bench, make_runner=lambda coordinator: MeasuredRunner(tiny_model, coordinator))


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def test_the_command_shows_a_table_and_writes_what_it_found(write_trace, tmp_path, capsys):
    trace = write_trace(block_row(1, 2, 3), block_row(1, 2, 4), block_row(1, 2, 4))
    written = tmp_path / "found.json"
    options = ("--memory", "1GiB,500%", "--policy", "lru", "--pace", "fast", "--json", str(written))
    assert command("bench", "prefix", "--trace", str(trace), *options) == 0
    shown = capsys.readouterr().out
    assert "of infinite" in shown
    report = read_report(written.read_text())
    assert [each.settings.memory_share for each in report.runs] == [None, 5.0]
    assert report.runs[0].totals.num_clairvoyant_tokens is not None


def test_the_command_tells_a_wrong_trace_in_one_line(write_trace, capsys):
    assert command("bench", "prefix", "--trace", str(write_trace({"a": 1}))) == 2
    assert "the format is not known" in capsys.readouterr().err


def test_the_command_runs_real_weights(write_trace, tmp_path):
    trace = write_trace(call("a", "full", user("hello")), call("a", "delta", user("more")))
    written = tmp_path / "found.json"
    options = ("--measured", "--model", "tiny-hybrid", "--memory", "16MiB", "--policy", "lru", "--json", str(written))
    assert command("bench", "prefix", "--trace", str(trace), "--no-clairvoyant", *options) == 0
    (found,) = read_report(written.read_text()).runs
    assert (found.settings.is_measured, found.totals.num_requests) == (True, 2)
    assert read_report(written.read_text()).command.startswith("hybrid-engine")


@pytest.mark.slow
@pytest.mark.skipif(TRACES_VARIABLE not in os.environ, reason=f"{TRACES_VARIABLE} names no folder of traces")
@pytest.mark.timeout(3600)
def test_all_sessions_of_a_large_trace_are_replayed_in_minutes_and_little_memory():
    items = read_workload(Path(os.environ[TRACES_VARIABLE]) / "weka_claude_code")
    bench = Bench("weka", items, memories=("25%",), policies=("lru",), with_clairvoyant=False)
    (found,) = compare(bench).runs
    totals = found.totals
    assert (totals.num_requests, totals.num_refused, totals.max_orphan_bytes) == (37_433, 0, 0)
    assert totals.processor_s < 600
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 6 * 2**20
