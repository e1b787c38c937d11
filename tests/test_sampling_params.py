"""Parameters are refused when they are made, before anything runs."""

import pytest

from hybrid_engine.errors import SamplingParamsError
from hybrid_engine.sampling_params import SamplingParams


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
    ],
    ids=str,
)
def test_a_value_out_of_its_kind_or_range_is_refused(wrong):
    with pytest.raises(SamplingParamsError, match=f"{next(iter(wrong))} is .*, must be"):
        SamplingParams(**wrong)


def test_none_means_no_stops_and_one_string_is_a_list_of_one():
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop="x").stop == ("x",)
