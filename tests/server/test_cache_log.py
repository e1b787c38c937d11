"""A server's cache log: numbers that tell what was equal, and a replay that hits what the server hit."""

import json
import random
from dataclasses import replace

import pytest
from live_server import LiveServer

from hybrid_engine import cli, tiny_hybrid
from hybrid_engine.bench.log_replay import read_log, replay_log
from hybrid_engine.bench.prefix_result import read_report
from hybrid_engine.errors import ConfigError, TraceError
from hybrid_engine.server.cache_log import PrefixNumbers
from hybrid_engine.startup import make_config, start_engine

SYSTEM = "You know all codes and ships. " * 4


def test_equal_beginnings_have_equal_numbers_and_no_others():
    numbers = PrefixNumbers()
    assert numbers.runs("", [5, 6, 7]) == [(0, 3)]
    assert numbers.runs("", [5, 6, 8, 7]) == [(0, 2), (3, 2)]
    assert numbers.runs("", [5, 6, 8, 7, 7]) == [(0, 2), (3, 3)]
    assert numbers.runs("salted", [5, 6]) == [(6, 2)]
    assert numbers.runs("", [6, 7]) == [(8, 2)]


def test_numbers_agree_with_the_prefixes_themselves_for_random_sequences():
    rng, numbers, named = random.Random(0), PrefixNumbers(), {}
    for _ in range(300):
        tokens = [rng.choice((1, 2)) for _ in range(rng.randrange(1, 12))]
        found = [first + index for first, count in numbers.runs("", tokens) for index in range(count)]
        for length, number in enumerate(found, start=1):
            assert named.setdefault(tuple(tokens[:length]), number) == number
    assert len(set(named.values())) == len(named)


def test_beyond_the_limit_all_is_forgotten_and_numbers_go_on():
    numbers = PrefixNumbers(max_tokens=3)
    numbers.runs("", [1, 2, 3, 4])
    assert numbers.runs("", [1, 2]) == [(4, 2)]


@pytest.fixture
def start(tmp_path):
    """Start a server of the small hybrid model that logs, with so much cache memory."""
    servers = []

    def start(memory: str) -> LiveServer:
        config = make_config(tiny_hybrid.find_model(tiny_hybrid.NAME), cache_memory_bytes=memory, max_num_seqs=2)
        # What other policies keep depends on how long everything takes.
        config = replace(config, cache=replace(config.cache, eviction_policy="lru"))
        servers.append(LiveServer(start_engine(config)[0], cache_log=tmp_path / "cache.log"))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def talk(server: LiveServer, name: str, num_turns: int, *, edits: bool = False) -> None:
    """Lead a conversation, one turn after the other; edits: the history shows other answers than were given."""
    messages = [{"role": "system", "content": SYSTEM}]
    for turn in range(num_turns):
        messages.append({"role": "user", "content": f"What is number {turn} of {name}?"})
        body = {"model": "tiny", "messages": messages, "max_tokens": 9, "temperature": 0}
        answer = server.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
        messages.append({"role": "assistant", "content": "Something." if edits else answer})


@pytest.mark.parametrize("memory", ["64MiB", "600KiB"], ids=["ample", "short"])
def test_a_replay_of_a_log_hits_what_the_server_hit(start, tmp_path, memory):
    server = start(memory)
    for name in ("Belora", "Moki", "Belora", "Tarsa"):
        talk(server, name, 3, edits=name == "Tarsa")
    talk(server, "Belora", 4)
    part = read_log(tmp_path / "cache.log")
    replay = replay_log(part, memories=[])
    assert len(part.calls) == 16
    assert replay.report.runs[0].totals.num_hit_tokens == replay.num_logged_hit_tokens > 0


def command(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    return ended.value.code


def test_the_command_shows_what_other_sizes_and_policies_would_have_hit(start, tmp_path, capsys):
    server = start("64MiB")
    talk(server, "Belora", 3)
    written = tmp_path / "found.json"
    options = ("--memory", "+1MiB,50%", "--policy", "lru,clairvoyant", "--json", str(written))
    assert command("replay", str(tmp_path / "cache.log"), *options) == 0
    shown = capsys.readouterr().out
    assert ("logged by the server" in shown, "as it was" in shown) == (True, True)
    settings = [run.settings for run in read_report(written.read_text()).runs]
    assert [each.policy for each in settings] == ["lru", *["lru", "clairvoyant"] * 2]
    assert settings[1].memory_bytes == settings[0].memory_bytes + 2**20


HEADER = {"cache_log": 1, "model": "m", "layers": [], "memory_bytes": 1}
LINE = {"time": 3.0, "total_s": 1.0, "input_tokens": 3, "output_tokens": 1, "hash_runs": [[0, 4]], "ends": [], "hit": 0}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "is empty: give the file"),
        ([HEADER], "holds no answers after cache.log, line 1"),
        ([LINE], "line 1: the log does not begin with what the cache is made of"),
        ([{**HEADER, "cache_log": 9}], "cache_log is 9, must be 1"),
        ([HEADER, {**LINE, "hash_runs": [[0, 3]]}], "line 2: hash_runs are 3 tokens, must be prompt and answer"),
        ([HEADER, {**LINE, "time": None}], "line 2: time is missing"),
    ],
)
def test_what_is_no_cache_log_is_refused_with_its_line(tmp_path, lines, message):
    path = tmp_path / "cache.log"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    with pytest.raises(TraceError, match=message):
        read_log(path)


def test_a_start_of_the_server_may_be_chosen_and_must_be_there(tmp_path):
    path = tmp_path / "cache.log"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in (HEADER, LINE, LINE, HEADER, LINE)))
    assert [len(read_log(path, start=start).calls) for start in (1, 2, None)] == [2, 1, 1]
    with pytest.raises(ConfigError, match="start is 3, must be from 1 to 2"):
        read_log(path, start=3)


LONGER = {**LINE, "time": 9.0, "input_tokens": 5, "hash_runs": [[0, 6]]}
OTHER = {**LINE, "time": 3.5, "hash_runs": [[50, 4]]}


@pytest.mark.parametrize(
    ("seconds", "think_s"), [(1.0, 4.5), (30.0, 5.0)], ids=["nothing in flight", "another one in flight"]
)
def test_calls_go_on_with_what_ended_last_or_else_with_their_conversation(tmp_path, seconds, think_s):
    path = tmp_path / "cache.log"
    lines = (HEADER, LONGER, {**OTHER, "total_s": seconds}, LINE)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    first, other, longer = [logged.call for logged in read_log(path).calls]
    assert first.session != other.session
    assert longer.session == (other.session if seconds == 1.0 else first.session)
    assert longer.when.think_s == think_s


def test_more_memory_hits_more_and_a_log_holds_no_text(start, tmp_path):
    server = start("600KiB")
    for name in ("Belora", "Moki", "Tarsa", "Belora", "Moki"):
        talk(server, name, 2)
    path = tmp_path / "cache.log"
    as_it_was, other = replay_log(read_log(path), memories=["+63MiB"]).report.runs
    assert other.totals.num_hit_tokens > as_it_was.totals.num_hit_tokens
    assert "Belora" not in path.read_text()
    header, first, *_ = map(json.loads, path.read_text().splitlines())
    assert set(first) == {
        *("time", "ttft_s", "total_s", "input_tokens", "output_tokens", "hash_runs", "ends", "hit", "finish"),
    }
    assert header["max_num_seqs"] == 2
