import numpy as np
import pytest
import torch

from hybrid_engine.errors import RequestError
from hybrid_engine.inputs import PromptInput, as_conversations, as_prompts, as_sampling
from hybrid_engine.sampling_params import SamplingParams

TEXT, IDS = PromptInput("hi", "hi"), PromptInput([1, 2], None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [TEXT]),
        (["hi", "hi"], [TEXT, TEXT]),
        ([1, 2], [IDS]),
        ([[1, 2], "hi"], [IDS, TEXT]),
        ({"prompt": "hi"}, [TEXT]),
        ([{"prompt_token_ids": [1, 2], "prompt": "hi"}], [PromptInput([1, 2], "hi")]),
        ({"prompt": "hi", "cache_salt": "s"}, [PromptInput("hi", "hi", "s")]),
        ({"prompt": "hi", "priority": -2}, [PromptInput("hi", "hi", priority=-2)]),
        ([], []),
    ],
    ids=["text", "texts", "ids", "mixed", "dict", "ids and their text", "salt", "priority", "none"],
)
def test_each_form_of_prompt_is_read(given, expected):
    assert as_prompts(given) == expected


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_token_ids_may_be_an_array_or_a_tensor(make):
    (prompt,) = as_prompts(make([1, 2]))
    assert list(prompt.content) == [1, 2]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_rows_of_token_ids_are_a_prompt_each(make):
    assert [list(prompt.content) for prompt in as_prompts(make([[1, 2], [3, 4]]))] == [[1, 2], [3, 4]]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "got 5"),
        (torch.tensor(5), r"got tensor\(5\)"),
        (torch.tensor([1.5]), r"prompt 0: it is tensor\(1.5"),
        (["hi", 5], "prompt 1: it is 5"),
        ({"prompt": "hi", "priority": "high"}, "priority is 'high', must be an integer"),
        ({"prompt": "hi", "message_boundaries": 2}, "message_boundaries is 2, must be numbers of tokens"),
        ([{}], "prompt 0: the dict has neither"),
        ([{"promt": "hi"}], "prompt 0: unknown key 'promt'"),
        ([["hi"]], "prompt 0: it is"),
        (b"hi", "it is b'hi', must be text: decode the bytes first"),
        ([b"hi"], "prompt 0: it is b'hi', must be text"),
        ({"prompt": 5}, "prompt is 5, must be text; token ids go into 'prompt_token_ids'"),
        ({"prompt": b"hi"}, "prompt is b'hi', must be text"),
        ({"prompt_token_ids": 5}, "prompt_token_ids is 5, must be a list of token ids"),
        ({"prompt_token_ids": "hi"}, "prompt_token_ids is 'hi', must be a list of token ids"),
    ],
    ids=[
        "number",
        "tensor of no dimension",
        "tensor of floats",
        "number among texts",
        "priority in words",
        "number for boundaries",
        "empty dict",
        "misspelt key",
        "text in a list too deep",
        "bytes",
        "bytes in a list",
        "number in a dict",
        "bytes in a dict",
        "number for ids",
        "text for ids",
    ],
)
def test_what_is_no_prompt_is_refused_and_named(given, message):
    with pytest.raises(RequestError, match=message):
        as_prompts(given)


def test_one_sampling_parameter_serves_all_prompts():
    assert as_sampling(None, 2) == [SamplingParams()] * 2


def test_as_many_sampling_parameters_as_prompts_are_wanted():
    with pytest.raises(RequestError, match="1 sampling parameters for 2 prompts"):
        as_sampling([SamplingParams()], 2)


@pytest.mark.parametrize("given", [{"n": 1}, "x", 5, [None]], ids=["dict", "text", "number", "list of none"])
def test_what_are_no_sampling_parameters_is_refused(given):
    with pytest.raises(RequestError, match=r"sampling_params is .*, must be a SamplingParams"):
        as_sampling(given, 1)


def test_one_conversation_and_several_are_told_apart():
    one = [{"role": "user", "content": "hi"}]
    assert as_conversations(one) == [one]
    assert as_conversations([one, one]) == [one, one]


@pytest.mark.parametrize(
    ("given", "message"),
    [(["hi"], "conversation 0 is 'hi'"), ([[]], "no messages"), (3, "got 3"), ([None], "conversation 0 is None")],
    ids=["text", "empty", "number", "none in a list"],
)
def test_what_is_no_conversation_is_refused(given, message):
    with pytest.raises(RequestError, match=message):
        as_conversations(given)
