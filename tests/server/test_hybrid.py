"""The tiny trained hybrid behind the server: conversations recall what was said, and hit all of their last turn."""

import pytest
from live_server import LiveServer

from hybrid_engine import tiny_hybrid
from hybrid_engine.startup import make_config, start_engine

FACTS = " The code of Belora is 4071. The ship of Moki is grifen."


@pytest.fixture(scope="module")
def hybrid():
    """A server of the model that comes with the engine."""
    settings = {"cache_memory_bytes": "64MiB", "dtype": "float32"}
    engine, _ = start_engine(make_config(tiny_hybrid.find_model(tiny_hybrid.NAME), **settings))
    server = LiveServer(engine)
    yield server
    server.stop()


def ask(server, messages, **options):
    options = {"temperature": 0, "max_tokens": 24} | options
    return server.client().chat.completions.create(model="tiny", messages=messages, **options)


def test_what_was_said_is_recalled(hybrid):
    messages = [{"role": "system", "content": FACTS}, {"role": "user", "content": "What is the code of Belora?"}]
    assert "4071" in ask(hybrid, messages).choices[0].message.content


def test_each_turn_hits_all_that_the_last_one_left(hybrid):
    messages = [{"role": "system", "content": FACTS}]
    left = 0
    for question in ("What is the code of Belora?", "What is the ship of Moki?", "What is the code of Belora?"):
        messages.append({"role": "user", "content": question})
        answer = ask(hybrid, messages, extra_body={"cache_salt": "turns"})
        # The last token of an answer was never computed.
        assert answer.usage.prompt_tokens_details.cached_tokens >= left - 1
        left = answer.usage.total_tokens
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    assert hybrid.metric('hybrid_engine:conversations_diverged_total{engine="0"') == 0


def test_an_edited_answer_still_hits_all_messages_before_it(hybrid):
    messages = [{"role": "system", "content": FACTS}, {"role": "user", "content": "What is the ship of Moki?"}]
    ask(hybrid, messages, extra_body={"cache_salt": "edited"})
    past = hybrid.post("/tokenize", messages=messages, add_generation_prompt=False).json()["count"]
    messages += [{"role": "assistant", "content": "No idea."}, {"role": "user", "content": "Why?"}]
    usage = ask(hybrid, messages, extra_body={"cache_salt": "edited", "explain_cache": True}).usage
    assert usage.prompt_tokens_details.cached_tokens >= past
    assert usage.prompt_tokens_details.diverged["where"] == "answer"


def test_states_are_a_group_of_their_own_in_what_is_shown(hybrid):
    ask(hybrid, [{"role": "user", "content": "Hello"}])
    cache = hybrid.http.get("/cache").json()
    assert {group["kind"] for group in cache["groups"]} == {"full", "state"}
    assert cache["num_checkpoints"] > 0
    assert hybrid.metric("hybrid_engine:checkpoints") == cache["num_checkpoints"]
