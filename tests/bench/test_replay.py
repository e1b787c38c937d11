"""Replays of small traces with known answers, and of a real one where it lies at hand."""

import json
import os
from pathlib import Path

import pytest
from small_traces import block_row, call, user

from hybrid_engine.bench.rendering import Renderer, load_encoder
from hybrid_engine.bench.replay import GROUP_KINDS, ReplayResult, ReplaySettings, replay
from hybrid_engine.bench.traces import Call, read_trace
from hybrid_engine.errors import ConfigError

TRACES_VARIABLE = "HYBRID_ENGINE_TRACES"
KINDS = sorted(GROUP_KINDS)


def run(calls: list[Call], *, replaces_assistant: bool = False, **settings) -> ReplayResult:
    def make_renderer() -> Renderer:
        return Renderer(load_encoder(None), replaces_assistant=replaces_assistant)

    return replay(calls, make_renderer, ReplaySettings(**settings))


def adds_up(result: ReplayResult) -> bool:
    parts = result.num_hit_tokens + result.num_last_tokens + sum(result.missed_tokens.values())
    return parts == result.num_prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_the_bound_is_what_prompts_share_with_what_came_before(write_trace, kind):
    # The second prompt shares two blocks, the third all but its last token, the fourth nothing.
    trace = write_trace(block_row(1, 2, 3), block_row(1, 2, 4), block_row(1, 2, 4), block_row(5))
    result = run(read_trace(trace), groups=kind)
    assert result.num_bound_tokens == 0 + 64 + 95 + 0
    assert (result.num_requests, result.num_prompt_tokens, result.num_answer_tokens) == (4, 3 * 96 + 32, 20)


@pytest.mark.parametrize(("kind", "hit"), [("full", 0 + 64 + 80), ("full+state", 0 + 0 + 80), ("all", 0 + 0 + 80)])
def test_a_fork_is_hit_at_once_by_full_attention_and_where_a_state_was_laid_else(write_trace, kind, hit):
    trace = write_trace(block_row(1, 2, 3), block_row(1, 2, 4), block_row(1, 2, 4))
    result = run(read_trace(trace), groups=kind)
    assert (result.num_hit_tokens, adds_up(result)) == (hit, True)
    assert result.missed_tokens["missing_state"] == (0 if kind == "full" else 64)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("replaces_assistant", [False, True], ids=["as generated", "edited"])
def test_a_conversation_goes_on_from_its_exact_past(conversations, kind, replaces_assistant):
    result = run(read_trace(conversations), groups=kind, replaces_assistant=replaces_assistant)
    assert adds_up(result)
    assert result.num_bound_tokens > result.num_prompt_tokens // 2
    # All but a few tokens at the fork between the two: "To Rome" and "To Oslo" part inside a message.
    assert result.num_bound_tokens - 16 <= result.num_hit_tokens <= result.num_bound_tokens


def test_editing_the_assistant_leaves_less_to_share(conversations):
    calls = read_trace(conversations)
    shares = [
        result.num_bound_tokens / result.num_prompt_tokens
        for result in (run(calls), run(calls, replaces_assistant=True))
    ]
    assert shares[1] < shares[0]


def test_several_sessions_run_at_once_and_each_keeps_its_order(conversations):
    result = run(read_trace(conversations), groups="all", concurrency=2)
    assert (result.num_requests, adds_up(result)) == (4, True)
    assert result.num_hit_tokens >= result.num_bound_tokens - 16
    assert result.num_steps < run(read_trace(conversations), groups="all").num_steps


def test_prompts_longer_than_the_memory_are_refused_and_the_rest_runs(write_trace):
    trace = write_trace(block_row(1), block_row(*range(2, 40)), block_row(1))
    result = run(read_trace(trace), groups="full", memory_bytes=20 * 16 * 1024)
    assert (result.num_requests, result.num_refused) == (2, 1)


def test_little_memory_tells_what_was_evicted(write_trace):
    trace = write_trace(
        block_row(1, 2, 3), *(block_row(10 * i, 10 * i + 1, 10 * i + 2) for i in range(1, 6)), block_row(1, 2, 3)
    )
    result = run(read_trace(trace), groups="full", memory_bytes=20 * 16 * 1024)
    assert (result.num_hit_tokens, result.missed_tokens["evicted"], result.num_bound_tokens) == (0, 95, 95)


def test_preemptions_are_counted_and_what_they_cost(write_trace):
    trace = write_trace(*(block_row(10 * i, 10 * i + 1, num_answer_tokens=200) for i in range(4)))
    result = run(read_trace(trace), groups="full", memory_bytes=24 * 16 * 1024, concurrency=4)
    assert result.num_requests == 4
    assert result.num_preemptions > 0
    assert result.num_computed_tokens == 4 * (64 + 199) + result.num_recomputed_tokens


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"groups": "half"}, "groups is 'half', must be one of full, full"), ({"concurrency": 0}, "concurrency is 0")],
)
def test_wrong_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ReplaySettings(**settings)


@pytest.mark.slow
@pytest.mark.parametrize(("replaces_assistant", "least"), [(False, 0.99), (True, 0.95)], ids=["as generated", "edited"])
@pytest.mark.parametrize("kind", ["full+state", "all"])
def test_agents_of_tau_bench_hit_nearly_all_that_a_radix_tree_would(kind, replaces_assistant, least):
    folder = Path(os.environ.get(TRACES_VARIABLE, "")) / "tau_airline_gpt4o"
    if not os.environ.get(TRACES_VARIABLE) or not folder.is_dir():
        pytest.skip(f"${TRACES_VARIABLE} names no folder with tau_airline_gpt4o: the trace is not part of the project")
    result = run(read_trace(folder, num_sessions=20), groups=kind, replaces_assistant=replaces_assistant)
    assert result.hit_share_of_bound >= least


@pytest.fixture
def run_cli(capsys):
    """Run `hybrid-engine bench replay`: the exit code, stdout, stderr."""
    from hybrid_engine.cli import main

    def run_cli(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "replay", *map(str, arguments)])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run_cli


def test_one_command_shows_a_table_and_writes_json(run_cli, conversations, tmp_path):
    code, out, _ = run_cli("--trace", conversations, "--groups", "full,all", "--json", tmp_path / "found.json")
    assert code == 0
    assert "share of the bound hit" in out
    assert "missed: never seen" in out
    found = json.loads((tmp_path / "found.json").read_text())
    assert [each["settings"]["groups"] for each in found["replays"]] == ["full", "all"]
    assert all(each["num_requests"] == 4 for each in found["replays"])


def test_a_wrong_trace_is_one_line_on_stderr(run_cli, write_trace):
    code, _, err = run_cli("--trace", write_trace(call("a", "delta", user("x"))))
    assert (code, err.count("\n")) == (2, 1)
    assert "trace.jsonl, line 1" in err
