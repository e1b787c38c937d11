"""`hybrid-engine serve` as people start and stop it."""

import signal

import httpx2
import pytest
from served import Served

from hybrid_engine.async_engine import AsyncEngine
from hybrid_engine.cli import app
from hybrid_engine.config import SpeculativeConfig
from hybrid_engine.errors import ConfigError


@pytest.mark.slow
def test_a_server_says_what_it_has_answers_and_drains_when_it_is_told_to_end(tiny_model):
    served = Served(str(tiny_model), "--memory", "8MiB", "--api-key", "alpha")
    assert any("Cache memory" in line for line in served.lines)
    body = {"prompt": "abc", "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"authorization": "Bearer alpha"}
    with httpx2.stream("POST", f"{served.url}/v1/completions", json=body, headers=headers, timeout=60) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        served.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest[-2:] == ["data: [DONE]", ""]
    assert served.process.wait(60) == 0


@pytest.mark.slow
def test_a_server_whose_engine_dies_ends_with_an_error(tiny_model):
    script = (
        "import sys; from hybrid_engine.runner.model_runner import ModelRunner\n"
        "def fail(self, plan): raise MemoryError('no more')\n"
        "ModelRunner.execute = fail\n"
        "from hybrid_engine.cli import main; main(sys.argv[1:])"
    )
    served = Served(str(tiny_model), "--memory", "8MiB", script=script)
    response = httpx2.post(f"{served.url}/v1/completions", json={"prompt": "abc"}, timeout=60)
    assert response.status_code == 503
    assert served.process.wait(60) == 1


@pytest.fixture
def serve_with(tmp_path):
    """Run `serve` on a model that isn't there, with a configuration file."""

    def run(text: str, *options: str) -> None:
        (tmp_path / "config.yaml").write_text(text)
        app(
            ["serve", str(tmp_path / "none"), "--config", str(tmp_path / "config.yaml"), *options],
            standalone_mode=False,
        )

    return run


def test_options_are_read_from_a_file(serve_with):
    with pytest.raises(ConfigError, match="max_queue is -3"):
        serve_with("max-queue: -3\nhost: 0.0.0.0\n")


@pytest.mark.parametrize("name", ["stream-interval-ms", "stream_interval_ms", "--stream-interval-ms"])
def test_an_option_is_found_by_the_name_that_the_command_line_has(serve_with, name):
    with pytest.raises(ConfigError, match="stream_interval_seconds is -1"):
        serve_with(f"{name}: -1000\n")


def test_the_command_line_counts_more_than_the_file(serve_with):
    with pytest.raises(ConfigError, match="max_queue is -4"):
        serve_with("max-queue: -3\n", "--max-queue", "-4")


def test_what_the_engine_is_told_comes_from_options_and_file_alike(serve_with, monkeypatch):
    class Told(Exception):
        pass

    def load(model, **settings):
        raise Told(settings)

    monkeypatch.setattr(AsyncEngine, "load", load)
    file = "speculative: ngram\nnum-speculative-tokens: 3\nhost-cache: 1GiB\nkv-cache-memory-bytes: 3GiB\n"
    with pytest.raises(Told) as raised:
        serve_with(file, "--async-depth", "1", "--disk-cache-size", "2GiB")
    told = raised.value.args[0]
    assert told["speculative"] == SpeculativeConfig("ngram", 3)
    assert told["cache_memory_bytes"] == "3GiB"
    assert (told["async_depth"], told["host_cache_bytes"], told["disk_cache_bytes"]) == (1, "1GiB", "2GiB")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-cue: 3", "'max-cue', which is no option"),
        ("- 3", "holds a list"),
        ("a: [", "can't be read"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(serve_with, text, message):
    with pytest.raises(ConfigError, match=message):
        serve_with(text)
