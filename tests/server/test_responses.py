"""/v1/responses through OpenAI's client."""

import json

import openai
import pytest

WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = 'Let me see.<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def respond(server, ask="what is the weather?", **options):
    return server.client().responses.create(model="tiny", input=ask, **options)


def test_an_input_is_answered(hello):
    response = respond(hello, instructions="be brief")
    assert response.output_text == "hello world"
    assert response.status == "completed"
    prompt = "<system>be brief</system><user>what is the weather?</user><assistant>"
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(prompt), 12)
    assert response.usage.input_tokens_details.cached_tokens is not None


def test_a_stream_tells_what_begins_and_ends(hello):
    events = list(respond(hello, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if "delta" not in event.type]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "hello world"
    assert events[-1].response.output_text == "hello world"


def test_a_call_and_its_result_go_round(serve, ids):
    server = serve(CALL)
    first = respond(server, tools=[WEATHER])
    message, call = first.output
    assert message.content[0].text == "Let me see."
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Oslo"})
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    asked = [{"role": "user", "content": "what is the weather?"}, *(item.model_dump() for item in first.output), result]
    second = respond(server, asked, tools=[WEATHER])
    # The answer as it came back is what the model wrote: the next turn hits all of it.
    assert second.usage.input_tokens_details.cached_tokens > first.usage.input_tokens


def test_a_stream_with_a_call_has_it_whole(serve):
    with server_stream(serve(CALL)) as stream:
        events = list(stream)
        (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
        assert json.loads(done.arguments) == {"city": "Oslo"}
        assert [item.type for item in stream.get_final_response().output] == ["message", "function_call"]


def server_stream(server):
    return server.client().responses.stream(model="tiny", input="weather?", tools=[WEATHER])


def test_an_answer_that_is_cut_is_incomplete(hello):
    response = respond(hello, max_output_tokens=3)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert response.output_text == "hel"


def test_reasoning_is_an_item_of_its_own(serve):
    response = respond(serve("<think>hm</think>It rains.", reasoning_parser="think"))
    assert [item.type for item in response.output] == ["reasoning", "message"]
    assert response.output[0].content[0].text == "hm"


def test_a_form_is_matched(gemma):
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert json.loads(respond(gemma, text=form, temperature=0, max_output_tokens=200).output_text)["n"] in (1, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"ask": []}, "input is empty"),
        ({"ask": [{"type": "item_reference", "id": "x"}]}, "must be message"),
        ({"ask": [{"type": "function_call", "arguments": "{}"}]}, "'function', which has 'name'"),
    ],
    ids=str,
)
def test_what_is_not_there_is_refused(hello, options, message):
    with pytest.raises(openai.BadRequestError, match=message):
        respond(hello, **options)
