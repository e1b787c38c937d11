"""/cache: what is held, and sessions that are kept and brought back."""

import pytest
from live_server import LiveServer

from hybrid_engine.server.prefixes import PrefixUse
from hybrid_engine.startup import make_config, start_engine

TALK = [
    {"role": "user", "content": "tell me of the bridge"},
    {"role": "assistant", "content": "it crosses a river"},
]


@pytest.fixture
def kept(tiny_model, tmp_path):
    """Start a server, as often as wanted, whose prefixes outlive it."""
    servers = []

    def start() -> LiveServer:
        settings = {"cache_memory_bytes": "2MiB", "block_size": 4, "dtype": "float32", "disk_cache": tmp_path}
        engine, _ = start_engine(make_config(tiny_model, **settings))
        servers.append(LiveServer(engine))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


def cached(response) -> int:
    assert response.status_code == 200, response.text
    return response.json()["prompt_tokens_details"]["cached_tokens"]


def test_a_session_that_was_saved_is_restored_by_another_process(kept):
    first = kept()
    saved = first.post("/cache/save", messages=TALK)
    assert saved.json()["disk_bytes"] > 0
    first.engine.flush_cache = lambda: None  # what was saved before counts, not what is flushed at the end
    second = kept()
    length = saved.json()["prompt_tokens"]
    restored = second.post("/cache/restore", messages=TALK)
    assert cached(restored) >= length - 4
    turn = second.post("/v1/chat/completions", messages=[*TALK, {"role": "user", "content": "why?"}], max_tokens=2)
    assert turn.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= length - 4
    assert second.http.get("/cache").json()["tiers"]["num_loads"] >= 1


def test_all_that_is_cached_is_saved_where_nothing_is_named(kept):
    server = kept()
    server.post("/v1/completions", prompt="a prompt that is worth keeping", max_tokens=2)
    saved = server.post("/cache/save").json()
    assert set(saved) == {"disk_bytes"}
    assert saved["disk_bytes"] > 0


def test_a_session_of_one_client_is_none_of_anothers(serve):
    server = serve("hi", api_keys=("alpha", "beta"))
    headers = [{"authorization": f"Bearer {key}"} for key in ("alpha", "beta")]
    body = {"prompt": "something that only one of them may find"}
    for header in headers:
        assert cached(server.http.post("/cache/restore", json=body, headers=header)) == 0
    assert cached(server.http.post("/cache/restore", json=body, headers=headers[0])) > 30


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("save", {}, "no disk cache"),
        ("restore", {}, "give prompt or messages"),
        ("restore", {"prompt": "a", "messages": TALK}, "give either prompt or messages"),
        ("restore", {"prompt": [-1]}, "prompt[0] is -1"),
        ("restore", {"prompt": "a", "colour": 1}, "colour is no field"),
    ],
)
def test_what_cannot_be_is_refused(hello, route, body, message):
    response = hello.post(f"/cache/{route}", **body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_the_most_useful_prefixes_are_named_without_their_text(serve):
    server = serve("hi")
    for text in ("shared by three of them: one", "shared by three of them: two", "shared by three of them: 333"):
        server.post("/v1/completions", prompt=text)
    (top,) = server.http.get("/cache").json()["top_prefixes"]
    assert (top["num_hits"], top["num_tokens"]) == (2, 24)
    assert "shared" not in server.http.get("/cache").text
    server.http.post("/cache/reset")
    assert server.http.get("/cache").json()["top_prefixes"] == []


def test_prefixes_that_were_not_hit_for_longest_are_forgotten():
    uses = PrefixUse(max_prefixes=2)
    for start in (1, 2, 1, 3):
        uses.note([start, 5, 6], 2)
    assert [use["num_hits"] for use in uses.top(9)] == [2, 1]
