"""Who may ask, how much, and what is told of it."""

import logging
import re

import openai
import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.server.settings import ServerSettings, read_api_keys

PROMPT = "a prompt that two clients both send"


def cached_tokens(client) -> int:
    usage = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2).usage
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("key", ["wrong", "alpha2", ""])
def test_a_wrong_key_is_refused(serve, key):
    server = serve("hi", api_keys=("alpha", "beta"))
    with pytest.raises(openai.AuthenticationError, match="missing or wrong"):
        server.client(key or "x").models.list()
    assert server.http.get("/v1/models").status_code == 401


def test_what_tells_nothing_of_prompts_needs_no_key(serve):
    server = serve("hi", api_keys=("alpha",))
    assert [server.http.get(path).status_code for path in ("/health", "/version", "/metrics")] == [200, 200, 200]
    assert [server.http.get(path).status_code for path in ("/cache", "/docs")] == [401, 401]


def test_clients_with_different_keys_share_no_prefix(serve):
    server = serve("hi", api_keys=("alpha", "beta"))
    assert cached_tokens(server.client("alpha")) == 0
    assert cached_tokens(server.client("beta")) == 0
    assert cached_tokens(server.client("alpha")) > 0


def test_clients_with_different_keys_share_prefixes_where_they_may(serve):
    server = serve("hi", api_keys=("alpha", "beta"), share_cache=True)
    assert cached_tokens(server.client("alpha")) == 0
    assert cached_tokens(server.client("beta")) > 0


@pytest.mark.parametrize("is_declared", [True, False])
def test_a_body_that_is_too_large_is_refused(serve, is_declared):
    server = serve("hi", max_body_bytes=1000)
    body = b" " * 2000
    response = server.http.post("/v1/completions", content=body if is_declared else iter([body]))
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"


def test_a_client_that_sends_too_slowly_is_given_up(serve):
    server = serve("hi", body_timeout_seconds=0.05)

    def slow():
        import time

        yield b"{"
        time.sleep(0.3)
        yield b"}"

    assert server.http.post("/v1/completions", content=slow()).status_code == 408


def test_the_log_has_no_text_and_names_the_request(serve, caplog):
    server = serve("hi")
    with caplog.at_level(logging.INFO):
        body = {"prompt": PROMPT}
        response = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine-7"})
    assert response.headers["x-request-id"] == "mine-7"
    (line,) = [record.getMessage() for record in caplog.records if record.name == "hybrid_engine.access"]
    assert line.startswith("POST /v1/completions 200")
    assert line.endswith("mine-7")
    assert "prompt that" not in caplog.text


def test_browsers_may_ask_from_the_origins_that_are_named(serve):
    server = serve("hi", cors_origins=("https://app.example",), api_keys=("alpha",))
    headers = {"origin": "https://app.example", "access-control-request-method": "POST"}
    allowed = server.http.options("/v1/chat/completions", headers=headers)
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    other = server.http.options("/v1/chat/completions", headers=headers | {"origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


def test_what_is_not_there_is_named(hello):
    assert "there is no /v2/x" in hello.http.get("/v2/x").json()["error"]["message"]
    assert hello.http.get("/v1/completions").status_code == 405
    assert hello.post("/v1/embeddings", input="a").status_code == 501


def test_keys_are_read_from_a_file(tmp_path):
    (tmp_path / "keys").write_text("# ours\nalpha\n\nbeta\n")
    assert read_api_keys(("gamma",), tmp_path / "keys") == ("gamma", "alpha", "beta")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no API key"):
        read_api_keys((), tmp_path / "empty")
    with pytest.raises(ConfigError, match="can't be read"):
        read_api_keys((), tmp_path / "none")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"model_names": ()}, "at least one name"),
        ({"max_queue": -1}, "max_queue is -1"),
        ({"max_prompts": 0}, "max_prompts is 0"),
        ({"request_timeout_seconds": 0}, "request_timeout_seconds is 0"),
        ({"stream_interval_seconds": -1}, "stream_interval_seconds is -1"),
        ({"api_keys": ("",)}, "API key is empty"),
    ],
    ids=str,
)
def test_settings_out_of_their_range_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        ServerSettings(**{"model_names": ("tiny",)} | wrong)


def test_the_dashboard_reads_only_metrics_that_there_are(hello):
    page = hello.http.get("/dashboard")
    assert page.headers["content-type"].startswith("text/html")
    metrics = hello.http.get("/metrics").text
    names = {name.removesuffix("_") for name in re.findall(r'"((?:vllm|hybrid_engine):[a-z_]+)"', page.text)}
    hello.post("/v1/completions", prompt="a")
    assert len(names) > 8
    assert [name for name in sorted(names) if name not in metrics] == []
