"""`bench serve`: a server is asked as the settings say, and what came back is added up right."""

import asyncio
import json

import pytest
from live_server import LiveServer
from scripted_engine import EOS, make_byte_tokenizer, make_scripted_engine
from small_traces import SYSTEM, call, user

from hybrid_engine.bench.serving import drive as drive_module
from hybrid_engine.bench.serving.client import Answer, Ask
from hybrid_engine.bench.serving.drive import Drive, DriveSettings, connect, drive
from hybrid_engine.bench.serving.figures import figures, medians, parse_slo, ratio_line
from hybrid_engine.bench.serving.workload import WorkloadSettings, make_sessions
from hybrid_engine.cli import app
from hybrid_engine.errors import ConfigError, TraceError


@pytest.fixture(scope="module")
def server():
    """A server that answers 'hello'."""
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}:{{ m.content }}{{ m.tool_calls }}\n{% endfor %}bot:"
    hello = [*tokenizer("hello", add_special_tokens=False)["input_ids"], EOS]
    engine = make_scripted_engine(tokenizer, lambda request: hello, num_blocks=2048, max_model_len=2048)
    server = LiveServer(engine, has_access_log=False)
    yield server
    server.stop()


def run(server, sessions, api_key=None, **settings) -> Drive:
    async def measure() -> Drive:
        async with connect(server.url, model=None, api_key=api_key, timeout_seconds=30) as asked:
            return await drive(asked, sessions, DriveSettings(**settings))

    return asyncio.run(measure())


def count_connections(monkeypatch) -> list[object]:
    """What connections are opened from now on."""
    opened: list[object] = []
    connect = asyncio.BaseEventLoop.create_connection

    async def counted(loop, *args, **kwargs):
        opened.append(args)
        return await connect(loop, *args, **kwargs)

    monkeypatch.setattr(asyncio.BaseEventLoop, "create_connection", counted)
    return opened


def test_every_request_is_answered_and_its_tokens_are_those_of_the_usage(server):
    sessions = make_sessions(WorkloadSettings("prefix", num_sessions=6, num_prefixes=1, prefix_words=20))
    done = run(server, sessions, concurrency=1)
    assert [answer.error for answer in done.answers] == [None] * 6
    assert {answer.num_answer_tokens for answer in done.answers} == {6}
    assert [len(session[0].body["prompt"]) for session in sessions] == [a.num_prompt_tokens for a in done.answers]
    assert all(answer.num_cached_tokens > 80 for answer in done.answers[1:])
    assert all(answer.start < answer.news[0] <= answer.news[-1] <= answer.end for answer in done.answers)


def test_no_more_sessions_run_at_once_than_there_are_clients(server):
    sessions = make_sessions(WorkloadSettings(num_sessions=12, prompt_words=4))
    assert run(server, sessions, concurrency=3).max_in_flight <= 3


def test_sessions_that_arrive_by_themselves_take_as_long_as_the_arrivals(server):
    sessions = make_sessions(WorkloadSettings(num_sessions=20, prompt_words=4))
    done = run(server, sessions, concurrency=None, sessions_per_second=100, seed=1)
    assert len(done.answers) == 20
    assert done.seconds > 0.1


def test_a_request_that_is_refused_ends_its_session_and_says_why(server):
    wrong = [Ask("/v1/completions", {"prompt": "a", "temperature": -1}), Ask("/v1/completions", {"prompt": "b"})]
    done = run(server, [wrong], concurrency=1)
    assert len(done.answers) == 1
    assert "temperature" in done.answers[0].error
    assert figures(done, {})["failed"] == 1


def test_an_agents_turns_are_asked_in_their_order_with_tool_calls_as_the_api_has_them(server, tmp_path):
    called = {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": "{}"}]}
    rows = [
        call("a", "full", SYSTEM, user("hi"), answer="x" * 12),
        call("a", "delta", user("and?"), called, {"role": "tool", "content": "3"}, answer="y" * 400),
    ]
    trace = tmp_path / "calls.jsonl"
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (session,) = make_sessions(WorkloadSettings("agents", trace=trace, answer_tokens=50))
    assert [ask.body["max_tokens"] for ask in session] == [3, 50]
    assert session[1].body["messages"][-2]["tool_calls"][0]["function"]["name"] == "look"
    done = run(server, [session], concurrency=1)
    assert [answer.error for answer in done.answers] == [None, None]
    assert done.answers[1].num_cached_tokens > len(SYSTEM["content"])


def test_a_trace_without_messages_is_refused(tmp_path):
    trace = tmp_path / "blocks.jsonl"
    trace.write_text(json.dumps({"input_tokens": 32, "output_tokens": 5, "hash_ids": [1], "block_tokens": 32}))
    with pytest.raises(TraceError, match="no messages"):
        make_sessions(WorkloadSettings("agents", trace=trace))


def answer(*news: float, end: float, tokens: int, error: str | None = None) -> Answer:
    return Answer(0.0, list(news), end, 10, 4, tokens, error)


def test_figures_are_those_of_the_times():
    done = Drive(
        [answer(1, 2, 3, end=3, tokens=3), answer(2, end=2, tokens=1), answer(end=9, tokens=0, error="no")], 4, 2
    )
    found = figures(done, parse_slo(["ttft:1500"]))
    assert (found["completed"], found["failed"], found["errors"]) == (2, 1, {"no": 1})
    assert (found["request_throughput"], found["request_goodput"]) == (0.5, 0.25)
    assert (found["output_throughput"], found["cached_share"]) == (1, 0.4)
    assert (found["mean_ttft_ms"], found["mean_tpot_ms"], found["p50_itl_ms"]) == (1500, 1000, 1000)


def test_medians_are_of_each_figure_and_errors_add_up():
    runs = [figures(Drive([answer(at, end=at, tokens=1)], 1, 1), {}) for at in (1, 2, 9)]
    runs[0]["errors"], runs[1]["errors"] = {"no": 1}, {"no": 2}
    assert (medians(runs)["mean_ttft_ms"], medians(runs)["errors"]) == (2000, {"no": 3})


@pytest.mark.parametrize("text", ["ttft", "ttft:-1", "itl:5", "ttft:x", ""])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="must be like 'ttft:500'"):
        parse_slo([text])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: WorkloadSettings("chat"), "workload is 'chat', must be one of random"),
        (lambda: WorkloadSettings("agents"), "needs a trace"),
        (lambda: WorkloadSettings(num_sessions=0), "num_sessions is 0"),
        (lambda: DriveSettings(concurrency=0), "concurrency is 0"),
        (lambda: DriveSettings(sessions_per_second=0), "request rate is 0"),
        (lambda: DriveSettings(concurrency=None), "neither a concurrency nor a request rate"),
    ],
)
def test_settings_that_cannot_be_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_where_no_server_is_that_is_said():
    with pytest.raises(ConfigError, match="is a server there"):
        run(type("Nowhere", (), {"url": "http://127.0.0.1:9"}), [], concurrency=1)


def test_the_ratio_to_a_peer_is_that_of_rounds_in_which_both_answered_everything():
    ours = [{"output_throughput": value, "failed": 0} for value in (10.0, 30.0, 12.0)]
    theirs = [{"output_throughput": 10.0, "failed": failed} for failed in (0, 1, 0)]
    assert ratio_line(ours, theirs, "p") == "answer tokens/s by those of p: 1.10 x (1.00 - 1.20, 2 rounds)"
    assert "no round" in ratio_line(ours[1:2], theirs[1:2], "p")


def test_a_connection_that_lay_idle_is_not_used_again(server, monkeypatch):
    opened = count_connections(monkeypatch)
    (session,) = make_sessions(WorkloadSettings(num_sessions=1, prompt_words=4))
    run(server, [[*session, *session]], concurrency=1)
    assert len(opened) == 1
    monkeypatch.setattr(drive_module, "IDLE_SECONDS", 0.05)
    run(server, [[*session, *session]], concurrency=1, think_seconds=0.3)
    assert len(opened) >= 3


def test_two_servers_are_shown_side_by_side_and_written_down(server, tmp_path, capsys):
    file = tmp_path / "found.json"
    options = ["--num-prompts", "3", "--prompt-words", "5", "--rounds", "2", "--goodput", "e2el:60000"]
    urls = [server.url, f"{server.url}/v1"]
    app(
        ["bench", "serve", "--url", urls[0], "--peer-url", urls[1], *options, "--json", str(file)],
        standalone_mode=False,
    )
    shown = capsys.readouterr().out
    assert f"answer tokens/s by those of {urls[1]}: " in shown
    found = json.loads(file.read_text())["servers"]
    assert [len(found[url]) for url in urls] == [2, 2]
    assert found[urls[0]][0]["request_goodput"] == found[urls[0]][0]["request_throughput"] > 0
