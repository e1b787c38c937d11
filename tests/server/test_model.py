"""A server of a real, tiny model: what it answers is what the model would, constrained where that is asked."""

import json

import pytest

ASK = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
                "required": ["n"],
                "additionalProperties": False,
            },
        },
    }
    for name in ("first", "second")
]


def complete(server, prompt="abcdef", **options):
    return server.client().completions.create(model="tiny", prompt=prompt, **{"max_tokens": 12} | options)


def ask(server, **options):
    options = {"max_tokens": 100, "temperature": 0} | options
    return server.client().chat.completions.create(model="tiny", messages=ASK, **options)


def test_a_stream_and_a_whole_answer_are_the_same_text(gemma):
    whole = complete(gemma, seed=3).choices[0].text
    chunks = complete(gemma, seed=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole


def test_the_seed_decides_and_another_gives_another_answer(gemma):
    texts = [complete(gemma, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


def test_a_bias_brings_a_token_or_forbids_it(gemma, ids):
    (token_id,) = ids("z")
    assert complete(gemma, temperature=0, logit_bias={token_id: 100}).choices[0].text == "z" * 12
    greedy = complete(gemma, temperature=0, extra_body={"return_token_ids": True}).choices[0]
    first = greedy.model_extra["token_ids"][0]
    other = complete(gemma, temperature=0, logit_bias={first: -100}, extra_body={"return_token_ids": True}).choices[0]
    assert other.model_extra["token_ids"][0] != first


def test_logprobs_of_the_prompt_are_those_of_the_answer_that_it_was(gemma, ids):
    answer = complete(gemma, temperature=0, logprobs=0, extra_body={"return_token_ids": True, "ignore_eos": True})
    token_ids = ids("abcdef") + answer.choices[0].model_extra["token_ids"]
    echoed = complete(gemma, prompt=token_ids, max_tokens=0, echo=True, logprobs=0)
    alone = answer.choices[0].logprobs.token_logprobs
    # float32, in chunks of other sizes.
    assert echoed.choices[0].logprobs.token_logprobs[6:] == pytest.approx(alone, abs=1e-5)


def test_a_json_schema_is_matched(gemma):
    schema = TOOLS[0]["function"]["parameters"]
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    assert set(json.loads(ask(gemma, response_format=form).choices[0].message.content)) == {"n"}


def test_a_regex_is_matched_in_both_ways_to_ask_for_it(gemma):
    for body in (
        {"response_format": {"type": "regex", "regex": "[ab]{3}"}},
        {"structured_outputs": {"regex": "[ab]{3}"}},
    ):
        text = gemma.post("/v1/completions", prompt="x", temperature=0, **body).json()["choices"][0]["text"]
        assert len(text) == 3
        assert set(text) <= {"a", "b"}


def test_a_schema_that_cannot_be_enforced_is_refused(gemma):
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "colour"}}}}
    response = gemma.post("/v1/chat/completions", messages=ASK, **body)
    assert response.status_code == 400
    assert "structured_outputs.json" in response.json()["error"]["message"]


def test_a_required_call_is_made(gemma):
    choice = ask(gemma, tools=TOOLS, tool_choice="required").choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls[0].function.name in ("first", "second")
    assert 0 <= json.loads(choice.message.tool_calls[0].function.arguments)["n"] <= 9


def test_a_named_call_is_made_also_in_a_stream(gemma):
    choice = {"type": "function", "function": {"name": "second"}}
    chunks = ask(gemma, tools=TOOLS, tool_choice=choice, stream=True)
    (call,) = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert call.function.name == "second"


def test_json_stays_the_answer_where_the_prompt_opened_reasoning(serve, gemma):
    body = {"response_format": {"type": "json_object"}, "chat_template_kwargs": {"think": True}, "temperature": 0}
    server_message = gemma.post("/v1/chat/completions", messages=ASK, max_tokens=60, **body).json()["choices"][0]
    assert server_message["message"]["content"].startswith("{")
    assert "reasoning_content" not in server_message["message"]


def test_the_prompt_of_a_conversation_is_what_the_python_api_renders(gemma, tiny_model):
    from hybrid_engine import LLM

    llm = LLM(tiny_model, cache_memory_bytes="4MiB", dtype="float32", block_size=4)
    body = {"messages": ASK, "return_token_ids": True, "max_tokens": 8, "temperature": 0}
    answer = gemma.post("/v1/chat/completions", **body).json()
    prompt = llm.apply_chat_template(ASK)
    assert answer["prompt_token_ids"] == prompt["prompt_token_ids"]
    from hybrid_engine import SamplingParams

    (output,) = llm.generate(prompt, SamplingParams(max_tokens=8, temperature=0), progress=False)
    assert answer["choices"][0]["token_ids"] == output.outputs[0].token_ids
