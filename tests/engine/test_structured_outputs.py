"""Structured outputs from end to end: whatever a random model would like to say, its answer matches."""

import json
import logging
import random
import re

import pytest
from llguidance import LLParserLimits

from hybrid_engine.errors import RequestError, SamplingParamsError
from hybrid_engine.llm import LLM
from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams
from hybrid_engine.structured import Grammars

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
COMPACT = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
PROMPTS = ["a", "sixteen letters.", "a prompt that is much longer than the window is, by far"]
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def llm(tiny_gemma3):
    return LLM(tiny_gemma3, cache_memory_bytes="2MiB", num_threads=1, chat_template=TEMPLATE)


def asked(structured=COMPACT, **options):
    """Parameters hot enough that a random model tries everything."""
    return SamplingParams(**{"max_tokens": 100, "temperature": 2.0, "seed": 7} | options, structured_outputs=structured)


def answers(outputs):
    return [(completion.text, completion.finish_reason) for output in outputs for completion in output.outputs]


def matches_the_schema(text):
    found = json.loads(text)
    return (
        list(found) == ["name", "age", "tags"]
        and (isinstance(found["name"], str) and len(found["name"]) <= 6)
        and (type(found["age"]) is int and 0 <= found["age"] <= 150)
        and (len(found["tags"]) <= 3 and set(found["tags"]) <= {"a", "b", None})
    )


@pytest.mark.parametrize("temperature", [0, 2.0])
@pytest.mark.parametrize(
    "structured",
    [COMPACT, StructuredOutputsParams(json=json.dumps(SCHEMA), whitespace_pattern="[ \\n]{0,2}")],
    ids=["compact", "spaced"],
)
def test_answers_are_json_that_matches_the_schema(llm, structured, temperature):
    outputs = llm.generate(PROMPTS, asked(structured, temperature=temperature, n=2, max_tokens=190))
    assert {reason for _, reason in answers(outputs)} == {"stop"}
    assert all(matches_the_schema(text) for text, _ in answers(outputs))


def test_a_model_that_loves_spaces_comes_to_an_end_all_the_same(llm):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    structured = StructuredOutputsParams(json=schema | {"additionalProperties": False})
    for text, reason in answers(llm.generate(PROMPTS, asked(structured, max_tokens=160))):
        assert reason == "stop"
        assert len(text) > len('{"ok": false}')
        assert json.loads(text)["ok"] in (True, False)


def test_each_of_n_answers_matches_in_its_own_way(llm):
    (output,) = llm.generate(PROMPTS[0], asked(n=6))
    texts = [completion.text for completion in output.outputs]
    assert all(matches_the_schema(text) for text in texts)
    assert len(set(texts)) == 6


@pytest.mark.parametrize(
    ("structured", "pattern"),
    [
        (StructuredOutputsParams(regex="[a-c]{3}(-[0-9]{1,4}){2}é"), "[a-c]{3}(-[0-9]{1,4}){2}é"),
        (StructuredOutputsParams(choice=["yes", "no", "no idea"]), "yes|no|no idea"),
        (StructuredOutputsParams(grammar='start: "[" start "]" | /[0-9]/'), r"\[*[0-9]\]*"),
        (StructuredOutputsParams(grammar='root ::= "[" root "]" | [0-9]'), r"\[*[0-9]\]*"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_answers_match_whole(llm, structured, pattern):
    for text, reason in answers(llm.generate(PROMPTS, asked(structured, n=3))):
        assert reason == "stop"
        assert re.fullmatch(pattern, text)
        assert text.count("[") == text.count("]")


def test_chat_answers_match_too(llm):
    outputs = llm.chat([{"role": "user", "content": "Who?"}], asked())
    assert matches_the_schema(outputs[0].outputs[0].text)


def test_a_stream_gives_the_same_answer_in_parts(llm):
    parts = [delta.outputs[0].text for delta in llm.stream(PROMPTS[0], asked())]
    assert len(parts) > 5
    assert "".join(parts) == llm.generate(PROMPTS[0], asked())[0].outputs[0].text


# Neighbours, chunks and preemptions


def test_neighbours_change_nothing_and_are_not_changed(llm):
    params = [SamplingParams(max_tokens=40, seed=1), asked(), SamplingParams(max_tokens=40, temperature=0)]
    alone = [llm.generate(prompt, param) for prompt, param in zip(PROMPTS, params, strict=True)]
    assert answers(llm.generate(PROMPTS, params)) == [answer for outputs in alone for answer in answers(outputs)]


@pytest.mark.parametrize("penalty", [1.0, 1.3])
def test_a_preemption_changes_no_answer(tiny_gemma3, llm, penalty):
    structured = StructuredOutputsParams(regex="(a[bc]{2,5}|[d-z]+!)*")
    params = asked(structured, ignore_eos=True, max_tokens=60, repetition_penalty=penalty)
    little = LLM(tiny_gemma3, cache_memory_bytes=120_000, max_model_len=80, max_num_batched_tokens=16)
    prompts = [*PROMPTS[:2], "seventeen letters"]
    outputs = little.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    assert answers(outputs) == answers(llm.generate(prompts, params))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_mixes_preempted_at_random_give_what_each_request_gives_alone(tiny_gemma3, llm, seed):
    draws = random.Random(seed)
    regex, choice = StructuredOutputsParams(regex="(a[bc]{2,5}|[d-z]+!)*"), StructuredOutputsParams(choice=["y"])
    prompts = ["".join(draws.choices("ab ", k=draws.randint(1, 20))) for _ in range(12)]
    params = [
        asked(draws.choice([None, regex, COMPACT, choice]), seed=index, ignore_eos=draws.random() < 0.5)
        for index in range(12)
    ]
    alone = [llm.generate(prompt, param) for prompt, param in zip(prompts, params, strict=True)]
    small_steps = LLM(tiny_gemma3, cache_memory_bytes="1MiB", max_num_batched_tokens=draws.choice([8, 16]))
    engine = small_steps._engine
    step = engine.step

    def step_and_preempt():
        if engine.scheduler.running and draws.random() < 0.2:
            engine.scheduler._preempt(draws.choice(engine.scheduler.running))
        return step()

    engine.step = step_and_preempt
    outputs = small_steps.generate(prompts, params)
    assert answers(outputs) == [answer for outputs in alone for answer in answers(outputs)]
    assert sum(output.metrics.num_preemptions for output in outputs) > 5


# Where an answer ends


def test_an_answer_ends_with_its_last_token_when_nothing_can_be_added(llm, ids):
    (output,) = llm.generate(PROMPTS[0], asked(StructuredOutputsParams(choice=["yes"]), logprobs=0))
    (completion,) = output.outputs
    assert (completion.text, completion.token_ids) == ("yes", ids("yes"))
    assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
    assert len(completion.logprobs) == 3


@pytest.mark.parametrize("max_tokens", [2, 3])
def test_an_answer_that_is_complete_at_its_last_token_was_not_cut(llm, max_tokens):
    outputs = llm.generate(PROMPTS[0], asked(StructuredOutputsParams(choice=["yes"]), max_tokens=max_tokens))
    assert answers(outputs) == [("yes"[:max_tokens], "stop" if max_tokens == 3 else "length")]


def test_the_model_may_end_an_answer_where_it_matches_unless_end_of_text_is_ignored(llm):
    structured = StructuredOutputsParams(regex="(ab)*")
    ended = answers(llm.generate(PROMPTS, asked(structured, n=3)))
    assert "stop" in {reason for _, reason in ended}
    assert all(re.fullmatch("(ab)*", text) for text, reason in ended if reason == "stop")
    ignored = answers(llm.generate(PROMPTS, asked(structured, n=3, ignore_eos=True)))
    assert set(ignored) == {("ab" * 50, "length")}


def test_min_tokens_puts_the_end_off_but_never_asks_for_more_than_matches(llm):
    open_end = answers(llm.generate(PROMPTS, asked(StructuredOutputsParams(regex="(ab)*"), min_tokens=20)))
    assert all(len(text) >= 20 for text, _ in open_end)
    complete = asked(StructuredOutputsParams(choice=["yes"]), min_tokens=20)
    assert answers(llm.generate(PROMPTS[0], complete)) == [("yes", "stop")]


def test_a_token_that_has_to_come_comes_even_if_min_tokens_would_forbid_it(llm, ids):
    params = asked(StructuredOutputsParams(choice=["yes"]), min_tokens=3, stop_token_ids=ids("e"))
    assert answers(llm.generate(PROMPTS[0], params)) == [("yes", "stop")]


def test_stop_tokens_and_stop_strings_end_an_answer_early(llm, ids):
    yes = StructuredOutputsParams(choice=["yes"])
    for stops in ({"stop_token_ids": ids("e")}, {"stop": "e"}):
        assert answers(llm.generate(PROMPTS[0], asked(yes, **stops))) == [("y", "stop")]


def test_the_last_token_of_a_complete_answer_stays_hidden_if_it_is_a_stop_token(llm, ids):
    (output,) = llm.generate(PROMPTS[0], asked(StructuredOutputsParams(choice=["yes"]), stop_token_ids=ids("s")))
    assert answers([output]) == [("ye", "stop")]
    assert output.outputs[0].stop_reason == ids("s")[0]


def test_a_grammar_that_grows_too_complex_ends_its_own_answer_only(tiny_gemma3, caplog):
    llm = LLM(tiny_gemma3, cache_memory_bytes="1MiB")
    tokenizer = llm.get_tokenizer().backend_tokenizer
    limits = LLParserLimits(step_max_items=20)
    llm._engine.runner._sampler._grammars = Grammars(tokenizer, vocab_size=259, eos_token_ids=(1,), limits=limits)
    ambiguous = asked(StructuredOutputsParams(grammar='start: a\na: "a" a "b" | "a" a | "x"'), temperature=0)
    plain = SamplingParams(max_tokens=20, temperature=0)
    with caplog.at_level(logging.WARNING):
        outputs = llm.generate(PROMPTS[:2], [ambiguous, plain])
    assert [reason for _, reason in answers(outputs)] == ["error", "length"]
    (message,) = caplog.messages
    assert message.startswith("request 0 ends with 'error': parser error: Too many items")


# Bad input


def test_a_schema_that_makes_no_sense_is_refused_before_anything_runs(llm):
    with pytest.raises(SamplingParamsError, match=r"prompt 1 of 2: structured_outputs.json .* Invalid type: objct"):
        llm.generate(PROMPTS[:2], [SamplingParams(), asked(StructuredOutputsParams(json={"type": "objct"}))])
    assert not llm._engine.has_unfinished_requests()


def test_an_engine_put_together_without_grammars_refuses(scripted):
    with pytest.raises(RequestError, match="put together without grammars"):
        scripted("yes").add_request("r", "hello", asked())
