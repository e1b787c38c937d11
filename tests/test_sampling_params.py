"""Parameters are refused when they are made, before anything runs."""

import pytest

from hybrid_engine.errors import SamplingParamsError
from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": 1.5},
        {"n": 0},
        {"max_tokens": 2.5},
        {"max_tokens": 0},
        {"min_tokens": 1.5},
        {"top_k": 1.5},
        {"top_k": None},
        {"seed": "a"},
        {"seed": -1},
        {"logprobs": 1.5},
        {"logprobs": True},
        {"prompt_logprobs": 5000},
        {"temperature": "x"},
        {"temperature": None},
        {"temperature": -1},
        {"top_p": 0},
        {"min_p": 2},
        {"repetition_penalty": 1e-40},
        {"presence_penalty": 3},
        {"stop": 5},
        {"stop": [1]},
        {"stop": [""]},
        {"stop_token_ids": 5},
        {"stop_token_ids": [1.5]},
        {"min_tokens": 5, "max_tokens": 4},
        {"logit_bias": {1: 101}},
        {"logit_bias": {1: float("nan")}},
        {"logit_bias": {"1": 1}},
        {"logit_bias": 5},
        {"structured_outputs": {"regex": "a"}},
        {"ignore_eos": "no"},
        {"skip_special_tokens": None},
    ],
    ids=str,
)
def test_a_value_out_of_its_kind_or_range_is_refused(wrong):
    with pytest.raises(SamplingParamsError, match=f"{next(iter(wrong))} is .*, must be"):
        SamplingParams(**wrong)


def test_none_means_no_stops_and_one_string_is_a_list_of_one():
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop="x").stop == ("x",)


@pytest.mark.parametrize(
    ("wrong", "name"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["b"]}, "structured_outputs"),
        ({"json": {}, "json_object": True}, "structured_outputs"),
        ({"json": "{"}, "json"),
        ({"json": [1]}, "json"),
        ({"json": "3"}, "json"),
        ({"json": {"const": {1}}}, "json"),
        ({"json_object": 1}, "json_object"),
        ({"regex": ""}, "regex"),
        ({"regex": 5}, "regex"),
        ({"grammar": ["a"]}, "grammar"),
        ({"choice": "yes"}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": ["a", ""]}, "choice"),
        ({"choice": [1]}, "choice"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace"),
        ({"choice": ["a"], "whitespace_pattern": " "}, "whitespace_pattern"),
    ],
    ids=str,
)
def test_a_structured_output_that_is_none_or_two_or_of_the_wrong_kind_is_refused(wrong, name):
    with pytest.raises(SamplingParamsError, match=f"^{name} is .*, must be"):
        StructuredOutputsParams(**wrong)


def test_a_json_schema_is_the_same_as_a_dict_and_as_a_text():
    as_dict, as_text = (StructuredOutputsParams(json=schema) for schema in ({"type": "null"}, '{"type":"null"}'))
    assert as_dict == as_text
    assert hash(as_dict) == hash(as_text)
