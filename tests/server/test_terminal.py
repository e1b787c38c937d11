"""`hybrid-engine chat --url`: a server at the other end of the terminal."""

import pytest

from hybrid_engine.cli import app
from hybrid_engine.errors import ConfigError


@pytest.fixture
def talk(monkeypatch, capsys):
    """Type lines to `chat` and return what it printed."""

    def run(url: str, *lines: str, options: tuple = ()) -> tuple[str, str]:
        left = iter([*lines, "/exit"])
        monkeypatch.setattr("builtins.input", lambda prompt: next(left))
        app(["chat", *options, "--url", url, "--max-tokens", "20"], standalone_mode=False)
        return capsys.readouterr()

    return run


def test_a_server_answers_and_says_what_was_cached(hello, talk):
    out, err = talk(hello.url, "hi", "and?")
    assert out == "hello world\nhello world\n"
    assert err.count("answer: 12") == 2
    assert "0 of them cached" in err


def test_each_line_brings_the_whole_conversation_along(hello, talk):
    before = hello.metric("vllm:prompt_tokens_total")
    talk(f"{hello.url}/v1/", "one", "two", options=("--system", "be kind"))
    system, one, two = "<system>be kind</system>", "<user>one</user>", "<user>two</user>"
    answer, invited = "<assistant>hello world</assistant>", "<assistant>"
    sent = len(system + one + invited) + len(system + one + answer + two + invited)
    assert hello.metric("vllm:prompt_tokens_total") - before == sent


def test_what_the_server_refuses_is_shown_and_the_talk_goes_on(hello, talk):
    _, err = talk(hello.url, "hi", options=("another-model",))
    assert "'another-model' isn't served here" in err


def test_sampling_options_are_sent(gemma, talk):
    out, _ = talk(gemma.url, "hi", options=("--regex", "[ab]{3}"))
    assert len(out.strip()) == 3
    assert set(out.strip()) <= {"a", "b"}


def test_options_of_a_model_that_is_loaded_here_are_refused(talk):
    with pytest.raises(ConfigError, match="--dtype is for a model that is loaded here"):
        talk("http://127.0.0.1:9", "hi", options=("--dtype", "float32"))


def test_where_no_server_is_that_is_said(talk):
    with pytest.raises(ConfigError, match="doesn't tell its models"):
        talk("http://127.0.0.1:9", "hi")
