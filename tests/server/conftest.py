"""Servers around engines that play a script, and around a tiny random Gemma."""

import pytest
from live_server import LiveServer
from scripted_engine import EOS, make_byte_tokenizer, make_scripted_engine
from tiny_gemma import save_tiny_gemma3

from hybrid_engine.startup import make_config, start_engine

TEMPLATE = (
    "{% if tools %}[tools]{% endif %}{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "</{{ message.role }}>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% if think is defined %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer():
    tokenizer = make_byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


@pytest.fixture(scope="session")
def ids(tokenizer):
    """Token ids of a text, one a byte."""
    return lambda text: tokenizer(text, add_special_tokens=False)["input_ids"]


@pytest.fixture
def serve(tokenizer, ids):
    """Start a server whose every request is answered with a text, or with what a function of the request returns."""
    servers = []

    def start(answer="", *, engine=None, **settings) -> LiveServer:
        script = answer if callable(answer) else lambda request: [*ids(answer), EOS]
        servers.append(LiveServer(make_scripted_engine(tokenizer, script, **engine or {}), **settings))
        return servers[-1]

    yield start
    for server in servers:
        server.stop()


@pytest.fixture(scope="module")
def hello(tokenizer, ids):
    """A server that answers 'hello world', for tests that change nothing about it."""
    server = LiveServer(
        make_scripted_engine(tokenizer, lambda request: [*ids("hello world"), EOS], max_model_len=2048, num_blocks=1024)
    )
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny_model(tokenizer, tmp_path_factory):
    """A tiny random Gemma 3 with a chat template, on disk."""
    return save_tiny_gemma3(tmp_path_factory.mktemp("tiny-model"), tokenizer)


@pytest.fixture(scope="module")
def gemma(tiny_model):
    """A server of that model."""
    engine, _ = start_engine(make_config(tiny_model, cache_memory_bytes="4MiB", block_size=4, dtype="float32"))
    server = LiveServer(engine)
    yield server
    server.stop()
