"""A server's cache log: numbers that tell what was equal, and a replay that hits what the server hit."""

import json
import random

import pytest
from live_server import LiveServer

from hybrid_engine import tiny_hybrid
from hybrid_engine.bench.log_replay import read_log, replay_log
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
