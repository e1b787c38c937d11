"""/v1/completions through OpenAI's client."""

import openai
import pytest


def complete(server, prompt="abcdefghij", **options):
    return server.client().completions.create(model="tiny", prompt=prompt, max_tokens=50, **options)


def test_a_prompt_is_completed(hello):
    answer = complete(hello)
    assert answer.choices[0].text == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 12)


def test_a_stream_brings_the_same_text_in_pieces_and_the_usage_last(hello):
    chunks = list(complete(hello, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "hello world"
    assert len(chunks) > 3
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize("seconds", [0, 3600])
def test_tokens_that_are_sent_together_are_events_of_their_own(serve, seconds):
    chunks = list(complete(serve("hello", stream_interval_seconds=seconds), stream=True))
    assert [chunk.choices[0].text for chunk in chunks] == [*"hello", ""]


def test_tokens_that_are_sent_together_share_the_time_before_them(serve, monkeypatch):
    server, noted = serve("hello", stream_interval_seconds=3600), []
    monkeypatch.setattr(server.service.metrics.news, "note", lambda *news: noted.append(news))
    list(complete(server, stream=True))
    assert sum(num_tokens for num_tokens, _ in noted) == 6
    assert len(noted) <= 2, "the first, and the rest with the last"
    assert [seconds is None for _, seconds in noted] == [True, False][: len(noted)]


def test_several_prompts_get_several_answers_each_numbered_through(hello, ids):
    answer = complete(hello, prompt=["one", "two"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    answer = complete(hello, prompt=[ids("one"), ids("two")])
    assert [choice.index for choice in answer.choices] == [0, 1]


def test_cached_tokens_are_always_reported_and_explained_on_demand(hello):
    prompt = "the same long prompt twice, please"
    first = complete(hello, prompt=prompt, extra_body={"explain_cache": True}).usage
    second = complete(hello, prompt=prompt, extra_body={"explain_cache": True}).usage
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens == 32
    explanation = second.prompt_tokens_details.explanation
    assert sum(explanation.values()) == second.prompt_tokens
    assert explanation["hit"] == 32
    assert complete(hello, prompt=prompt).usage.prompt_tokens_details.model_extra.get("explanation") is None


def test_another_salt_finds_nothing(hello):
    prompt = "a prompt that is salted in two ways"
    complete(hello, prompt=prompt, extra_body={"cache_salt": "a"})
    other = complete(hello, prompt=prompt, extra_body={"cache_salt": "b"}).usage
    same = complete(hello, prompt=prompt, extra_body={"cache_salt": "a"}).usage
    assert (other.prompt_tokens_details.cached_tokens, same.prompt_tokens_details.cached_tokens) == (0, 32)


def test_token_ids_go_in_and_come_out(hello, ids):
    body = {"model": "tiny", "prompt": ids("abc"), "max_tokens": 3, "return_token_ids": True}
    choice = hello.post("/v1/completions", **body).json()["choices"][0]
    assert choice["prompt_token_ids"] == ids("abc")
    assert choice["token_ids"] == ids("hel")
    assert choice["finish_reason"] == "length"


def test_echo_with_logprobs_and_no_tokens_is_what_evaluations_ask_for(hello):
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "logprobs": 1}
    answer = hello.post("/v1/completions", **body).json()
    choice = answer["choices"][0]
    assert choice["text"] == "abc"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2]
    assert choice["logprobs"]["token_logprobs"] == [None, -0.5, -0.5]
    assert answer["usage"]["completion_tokens"] == 0


def test_logprobs_of_an_answer_name_the_chosen_token_and_the_likeliest(hello):
    choice = complete(hello, logprobs=2).choices[0]
    assert choice.logprobs.tokens[:5] == list("hello")
    assert choice.logprobs.token_logprobs[0] == -0.5
    assert choice.logprobs.top_logprobs[0] == {"h": -0.5, "i": -0.25}


def test_a_stop_string_ends_the_answer_before_it(hello):
    choice = complete(hello, stop=["wor"]).choices[0]
    assert choice.text == "hello "
    assert choice.model_extra["stop_reason"] == "wor"


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": "a", "temprature": 1}, "temprature", "did you mean 'temperature'"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "suffix is 'b'"),
        ({"prompt": "a", "best_of": 3}, "best_of", "must be n"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "must be at least 1"),
        ({"prompt": "a", "temperature": "hot"}, "temperature", "temperature is 'hot'"),
        ({"prompt": "a", "temperature": -1}, None, "temperature is -1"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
        ({"prompt": []}, "prompt", "must be 1 to"),
        ({"prompt": ""}, "prompt", "is empty"),
        ({"prompt": [100000]}, "prompt", "must be from 0 to 258"),
        ({}, "prompt", "prompt is missing"),
        ({"prompt": "a", "n": 2000}, "n", "n is 2000"),
        ({"prompt": "a" * 3000}, "prompt", "max_model_len is 2,048"),
        ({"prompt": "\ud800"}, None, "no valid text"),
        ({"prompt": "a", "priority": 3}, "priority", "order of arrival"),
        ({"prompt": "a", "logit_bias": {"x": 1}}, None, "keyed by token ids"),
        ({"prompt": "a", "response_format": {"type": "regex"}}, "response_format.regex", "has no 'regex'"),
        ({"prompt": "a", "structured_outputs": {"regex": "a"}}, None, "without grammars"),
    ],
    ids=str,
)
def test_what_is_wrong_is_refused_by_name(hello, body, param, message):
    response = hello.post("/v1/completions", **body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert message in error["message"]


def test_fields_that_are_ignored_change_nothing(hello):
    ignored = {"metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "x"}
    assert complete(hello, user="somebody", extra_body=ignored).choices[0].text == "hello world"


def test_a_model_that_is_not_served_is_not_found(hello):
    with pytest.raises(openai.NotFoundError, match="there is tiny"):
        hello.client().completions.create(model="other", prompt="a")


def test_a_body_that_is_no_json_is_a_bad_request(hello):
    response = hello.http.post("/v1/completions", content=b'{"prompt": ', headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "no JSON" in response.json()["error"]["message"]
