"""Answers of each family of models, in pieces of every size, come out as text, reasoning and calls."""

import json
from itertools import groupby

import pytest

from hybrid_engine.errors import ConfigError
from hybrid_engine.server.parsing.base import Reasoning, Text, ToolCall
from hybrid_engine.server.parsing.families import find_family

SCHEMAS = {"f": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}
HARMONY = (
    "<|channel|>analysis<|message|>Which city?<|end|><|start|>assistant<|channel|>commentary<|message|>One moment."
    "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
)

# Family, what the prompt ends with, the answer, and what it is: text, reasoning, calls.
ANSWERS = {
    "jamba": ("jamba none", "", 'Sure.<tool_calls>[{"name": "f", "arguments": {"days": 2}}]</tool_calls>', "Sure.", ""),
    "granite 3": ("granite none", "", '<|tool_call|>[{"name": "f", "arguments": {"days": 2}}]', "", ""),
    "granite 4": ("granite none", "", '<tool_call>\n{"name": "f", "arguments": {"days": 2}}\n</tool_call>', "", ""),
    "hermes": (
        "hermes none",
        "",
        'Sure.\n\n<tool_call>\n{"name": "f", "arguments": {"days": 2}}\n</tool_call>\n',
        "Sure.",
        "",
    ),
    "hermes with its marker in an argument": (
        "hermes none",
        "",
        '<tool_call>{"name": "f", "arguments": {"city": "</tool_call>\\"", "days": 2}}</tool_call>',
        "",
        "",
    ),
    "hermes after reasoning": (
        "hermes think",
        "<assistant>",
        '<think>\nWhich?\n</think>\n\nSure.<tool_call>{"name": "f", "arguments": {"days": 2}}</tool_call>',
        "Sure.",
        "Which?\n",
    ),
    "hermes after reasoning that the prompt opened": (
        "hermes think",
        "<assistant><think>\n",
        'Which?</think>Sure.<tool_call>{"name": "f", "arguments": {"days": 2}}</tool_call>',
        "Sure.",
        "Which?",
    ),
    "qwen xml": (
        "qwen_xml none",
        "",
        "Sure.\n<tool_call>\n<function=f>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "Sure.",
        "",
    ),
    "qwen xml without its outer marker": (
        "hermes none",
        "",
        "<function=f>\n<parameter=days>\n2\n</parameter>\n</function>",
        "",
        "",
    ),
    "gemma": (
        "gemma none",
        "",
        "<start_function_call>call:f{city:<escape>Os,lo}<escape>,days:2}<end_function_call>",
        "",
        "",
    ),
    "llama": ("llama_json none", "", '{"name": "f", "parameters": {"days": 2}}', "", ""),
    "llama with its marker": ("llama_json none", "", '<|python_tag|>{"name": "f", "parameters": {"days": 2}}', "", ""),
    "granite with reasoning": (
        "granite granite",
        "",
        'Here is my thought process: Which? Here is my response: Sure.<|tool_call|>[{"name": "f", "arguments": '
        '{"days": 2}}]',
        " Sure.",
        " Which? ",
    ),
    "harmony": ("harmony harmony", "", HARMONY + '{"days": 2}', "One moment.", "Which city?"),
}


def read(family: str, prompt: str, answer: str, size: int, *, has_tools: bool = True) -> list:
    """Return what comes of an answer that arrives in pieces of so many letters, neighbours of a kind joined."""
    tools, reasoning = family.split()
    found = find_family("", tool_parser=tools, reasoning_parser=reasoning, special_tokens=frozenset())
    parser = found.parser(prompt, schemas=SCHEMAS if has_tools else None)
    events = [
        event for start in range(0, len(answer), size) for event in parser.add(answer[start : start + size])
    ] + parser.finish()
    joined = []
    for kind, neighbours in groupby(events, type):
        group = list(neighbours)
        joined += group if kind is ToolCall else [kind("".join(event.text for event in group))]
    return joined


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_taken_apart_the_same_however_it_is_cut(name, size):
    family, prompt, answer, text, reasoning = ANSWERS[name]
    events = read(family, prompt, answer, size)
    assert "".join(event.text for event in events if isinstance(event, Text)) == text
    assert "".join(event.text for event in events if isinstance(event, Reasoning)) == reasoning
    (call,) = [event for event in events if isinstance(event, ToolCall)]
    assert (call.name, json.loads(call.arguments)["days"]) == ("f", 2)


def test_arguments_are_texts_where_the_schema_says_so():
    (call,) = read(*ANSWERS["qwen xml"][:3], 1000)[1:]
    assert json.loads(call.arguments) == {"city": "12", "days": 2}


def test_gemmas_values_are_nested():
    answer = "<start_function_call>call:f{a:{b:[1,<escape>x<escape>,true]},c:null}<end_function_call>"
    (call,) = read("gemma none", "", answer, 3)
    assert json.loads(call.arguments) == {"a": {"b": [1, "x", True]}, "c": None}


@pytest.mark.parametrize(
    ("family", "answer"),
    [
        ("hermes none", 'a <tool_call>{"name": "f", "argu'),
        ("hermes none", "a <tool_call>no JSON</tool_call> b"),
        ("hermes none", "a < b and <tool"),
        ("jamba none", '<tool_calls>[{"nome": 1}]</tool_calls>'),
        ("gemma none", "<start_function_call>call:f{a:[1}<end_function_call>"),
        ("llama_json none", ' {"answer": 42}'),
        ("llama_json none", '{"name": "f", "parameters": '),
        ("harmony harmony", "no channel at all"),
        ("none think", "  a text that thinks <think>nothing</think>"),
        ("hermes none", "a text with space behind \n"),
    ],
)
@pytest.mark.parametrize("size", [1, 1000])
def test_what_turns_out_to_be_no_call_stays_text(family, answer, size):
    assert "".join(event.text for event in read(family, "", answer, size)) == answer


def test_a_good_call_counts_also_behind_a_broken_one():
    answer = '<tool_call>{"name": f}</tool_call><tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert [type(event) for event in read("hermes none", "", answer, 5)] == [Text, ToolCall]


def test_a_call_without_its_end_marker_counts_when_it_is_whole():
    (call,) = read("hermes none", "", '<tool_call>\n{"name": "f", "arguments": {"days": 2}}', 4)
    assert call == ToolCall("f", '{"days": 2}')


def test_reasoning_that_never_ends_stays_reasoning():
    assert read("none think", "<think>\n", "and so on and", 3) == [Reasoning("and so on and")]


def test_reasoning_that_the_prompt_has_ended_is_over():
    assert read("none think", "<think>\n\n</think>\n\n", "It rains.", 3) == [Text("It rains.")]


def test_text_is_all_there_is_without_tools():
    answer = ANSWERS["hermes"][2]
    assert read("hermes none", "", answer, 3, has_tools=False) == [Text(answer)]


@pytest.mark.parametrize(
    ("template", "family"),
    [
        ("… <tool_call> … <think>", ("hermes", "think")),
        ("… <tool_call> <function=…", ("qwen_xml", "none")),
        ("… <|channel|> …", ("harmony", "harmony")),
        ("… <tool_calls> …", ("jamba", "none")),
        ("… <|tool_call|> … <response>", ("granite", "granite")),
        ("… <start_function_call> …", ("gemma", "none")),
        ("… <|python_tag|> …", ("llama_json", "none")),
        ("<start_of_turn>", ("none", "none")),
    ],
)
def test_the_template_tells_the_family(template, family):
    found = find_family(template, special_tokens=frozenset())
    assert (found.tools, found.reasoning) == family


def test_a_parser_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="tool_parser is 'herms', must be one of auto"):
        find_family("", tool_parser="herms", special_tokens=frozenset())
