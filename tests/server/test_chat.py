"""/v1/chat/completions through OpenAI's client, with scripted answers."""

import json

import openai
import pytest
from scripted_engine import EOS

ASK = [{"role": "user", "content": "what is the weather?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = 'Let me see.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
TWO_CALLS = CALL + '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def ask(server, messages=ASK, **options):
    return server.client().chat.completions.create(model="tiny", messages=messages, **options)


def test_a_conversation_is_answered(hello):
    answer = ask(hello)
    assert answer.choices[0].message.content == "hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.prompt_tokens == len("<user>what is the weather?</user><assistant>")


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(hello):
    chunks = list(ask(hello, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "hello world"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == ["stop"]


def test_parts_of_text_are_one_text(hello):
    parts = [{"type": "text", "text": "what is "}, {"type": "text", "text": "the weather?"}]
    assert ask(hello, [{"role": "user", "content": parts}]).usage.prompt_tokens == ask(hello).usage.prompt_tokens


def test_a_developer_speaks_as_the_system(hello, ids):
    body = {"messages": [{"role": "developer", "content": "be kind"}], "return_token_ids": True}
    answer = hello.post("/v1/chat/completions", **body).json()
    assert answer["prompt_token_ids"] == ids("<system>be kind</system><assistant>")


def test_a_call_becomes_a_tool_call(serve):
    choice = ask(serve(CALL), tools=[WEATHER]).choices[0]
    assert choice.message.content == "Let me see."
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})


def test_a_stream_brings_each_call_whole_with_its_number(serve):
    chunks = list(ask(serve(TWO_CALLS), tools=[WEATHER], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1]
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Oslo", "Rome"]
    assert calls[0].id != calls[1].id
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Let me see."


def test_one_call_is_kept_where_several_at_once_are_not_wanted(serve):
    assert len(ask(serve(TWO_CALLS), tools=[WEATHER], parallel_tool_calls=False).choices[0].message.tool_calls) == 1


def test_a_call_is_text_where_none_is_wanted(serve):
    message = ask(serve(CALL), tools=[WEATHER], tool_choice="none").choices[0].message
    assert message.content == CALL
    assert message.tool_calls is None


def test_the_result_of_a_call_is_read_by_the_template(hello, ids):
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "rain"}]
    answer = hello.post("/v1/chat/completions", messages=messages, return_token_ids=True).json()
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call></assistant><tool>rain</tool>'
    assert ids(text) == answer["prompt_token_ids"][-len(text) - len("<assistant>") : -len("<assistant>")]


def test_reasoning_is_kept_apart_where_the_template_opens_it(serve):
    server = serve("hm\n</think>\n\nIt rains.", reasoning_parser="think")
    answer = ask(server, extra_body={"chat_template_kwargs": {"think": True}})
    assert answer.choices[0].message.content == "It rains."
    assert answer.choices[0].message.reasoning_content.strip() == "hm"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("hm\n</think>")


def test_reasoning_then_a_call_stream_in_their_own_fields(serve):
    server = serve("<think>which city?</think>" + CALL, reasoning_parser="think")
    deltas = [chunk.choices[0].delta for chunk in ask(server, tools=[WEATHER], stream=True)]
    assert "".join(delta.model_extra.get("reasoning_content") or "" for delta in deltas) == "which city?"
    assert "".join(delta.content or "" for delta in deltas) == "Let me see."
    assert sum(len(delta.tool_calls or []) for delta in deltas) == 1


def test_the_next_turn_of_a_conversation_hits_all_of_the_last(serve):
    server = serve("It rains.")
    first = ask(server)
    messages = [*ASK, {"role": "assistant", "content": "It rains."}, {"role": "user", "content": "still?"}]
    second = ask(server, messages)
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.total_tokens - 4
    assert server.metric('hybrid_engine:conversations_diverged_total{engine="0"') == 0


@pytest.mark.parametrize(("changed", "where"), [("It shines.", "answer"), ("It rains.", None)])
def test_a_conversation_that_changed_its_past_is_told_where(serve, changed, where):
    server = serve("It rains.")
    ask(server)
    messages = [*ASK, {"role": "assistant", "content": changed}, {"role": "user", "content": "still?"}]
    usage = ask(server, messages, extra_body={"explain_cache": True}).usage
    diverged = usage.prompt_tokens_details.model_extra.get("diverged")
    assert (diverged and diverged["where"]) == where
    if where:
        assert diverged["at_token"] == len("<user>what is the weather?</user><assistant>It ")


def test_logprobs_of_a_chat_have_bytes_and_the_likeliest(hello):
    entry = ask(hello, logprobs=True, top_logprobs=1).choices[0].logprobs.content[0]
    assert (entry.token, entry.logprob, entry.bytes) == ("h", -0.5, [ord("h")])
    assert [(top.token, top.logprob) for top in entry.top_logprobs] == [("i", -0.25)]


def test_n_answers_are_drawn_apart(serve, ids):
    server = serve(lambda request: [*ids(f"answer {request.request_id[-1]}"), EOS])
    assert sorted(choice.message.content for choice in ask(server, n=3).choices) == ["answer 0", "answer 1", "answer 2"]


def test_the_last_message_can_be_continued(hello, ids):
    messages = [*ASK, {"role": "assistant", "content": "It is"}]
    body = {"messages": messages, "continue_final_message": True, "return_token_ids": True}
    answer = hello.post("/v1/chat/completions", **body).json()
    assert answer["prompt_token_ids"] == ids("<user>what is the weather?</user><assistant>It is")


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role", "must be one of"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "a text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "'text'"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs is not true"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "give one"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "no field"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "'tokenize'"),
        ({"chat_template_kwargs": {"messages": 1}}, "messages", "refused"),
        ({"functions": []}, "functions", "no field"),
        ({"max_tokens": 0}, None, "max_tokens is 0"),
        (
            {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "none of the tools",
        ),
    ],
    ids=str,
)
def test_what_is_wrong_with_a_conversation_is_refused_by_name(hello, body, param, message):
    response = hello.post("/v1/chat/completions", **{"messages": ASK} | body)
    error = response.json()["error"]
    assert response.status_code == 400
    assert error["param"] == param
    assert message in error["message"]


def test_tools_of_a_model_whose_form_is_not_known_are_refused(serve):
    with pytest.raises(openai.BadRequestError, match="start the server with --tool-parser"):
        ask(serve("x", tool_parser="none"), tools=[WEATHER])
