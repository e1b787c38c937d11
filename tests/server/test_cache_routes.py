"""/cache: what is held, and sessions that are kept and brought back."""

import pytest
from live_server import LiveServer

from hybrid_engine.server.prefixes import PrefixUse
from hybrid_engine.startup import make_config, start_engine

TALK = [
    {"role": "user", "content": "tell me of the bridge"},
    {"role": "assistant", "content": "it crosses a river"},
]

ROOMY = {"num_blocks": 160, "max_model_len": 256}
"""The longest request has place beside what is pinned."""


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


def evict(server) -> None:
    for number in range(30):
        server.post("/v1/completions", prompt=f"{number} is another prompt altogether, of some length; " * 3)


def test_a_pinned_prefix_stays_until_it_is_let_go(serve):
    server = serve("hi", engine=ROOMY)
    prompt = "the one that stays whatever else is asked"
    pinned = server.post("/cache/pins", prompt=prompt, name="mine").json()
    assert (pinned["name"], pinned["num_tokens"]) == ("mine", len(prompt))
    evict(server)
    assert server.http.get("/cache").json()["pins"] == [{"name": "mine", "num_tokens": len(prompt)}]
    assert cached(server.post("/cache/restore", prompt=prompt + " and more")) >= len(prompt) - 4
    assert server.http.delete("/cache/pins/mine").status_code == 200
    evict(server)
    assert cached(server.post("/cache/restore", prompt=prompt + " and more")) == 0
    assert all(group["num_held"] == 0 for group in server.http.get("/cache").json()["groups"])


def test_a_name_is_taken_once_and_let_go_once(serve):
    server = serve("hi", engine=ROOMY)
    for status in (200, 409):
        assert server.post("/cache/pins", prompt="a prefix that stays", name="mine").status_code == status
    for status in (200, 404):
        assert server.http.delete("/cache/pins/mine").status_code == status
    server.post("/cache/pins", prompt="a prefix that stays", name="mine")
    server.http.post("/cache/reset")
    assert server.http.get("/cache").json()["pins"] == []


def test_a_prefix_that_is_not_cached_is_not_pinned_and_leaves_its_name(serve):
    server = serve("hi", engine=ROOMY | {"enable_prefix_caching": False})
    for _ in range(2):
        response = server.post("/cache/pins", prompt="a prefix", name="mine")
        assert (response.status_code, response.json()["error"]["code"]) == (409, "not_cached")


def test_nobody_lets_go_what_another_client_has_pinned(serve):
    server = serve("hi", api_keys=("alpha", "beta"), engine=ROOMY)
    alpha, beta = ({"authorization": f"Bearer {key}"} for key in ("alpha", "beta"))
    server.http.post("/cache/pins", json={"prompt": "a prefix that stays", "name": "mine"}, headers=alpha)
    assert server.http.delete("/cache/pins/mine", headers=beta).status_code == 404
    assert server.http.get("/cache", headers=beta).json()["pins"] == []
    assert server.http.delete("/cache/pins/mine", headers=alpha).status_code == 200


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
        uses.note("", [start, 5, 6], 2)
    assert [use["num_hits"] for use in uses.top(9, may_see=lambda salt: True)] == [2, 1]
