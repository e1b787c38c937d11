"""Formats that others write, each told from what it holds."""

import json

import pytest
from small_traces import block_row

from hybrid_engine.bench.calls import When
from hybrid_engine.bench.traces import Part, read_trace
from hybrid_engine.errors import TraceError

HI, YES = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
MORE = {"role": "user", "content": "more"}
REQUEST = {"t": 0.0, "type": "s", "in": 130, "out": 5, "hash_ids": [1, 2], "think_time": 0.0, "api_time": 2.0}


def chat(*messages: dict, **rest: object) -> dict:
    return {"messages": list(messages), **rest}


@pytest.mark.parametrize(
    "row",
    [
        chat(HI, response="yes"),
        chat(HI, choices=[{"index": 0, "message": YES}]),
        chat(HI, YES),
        {"custom_id": "1", "body": chat(HI, model="m"), "response": {"status_code": 200, "body": {"choices": [YES]}}},
        {"request": {"body": chat(HI)}, "response": {"choices": [{"message": YES}]}, "timestamp": 17},
    ],
    ids=["text", "choices", "the last message", "a batch file", "a server's log"],
)
def test_a_request_and_its_answer_are_found_wherever_a_log_has_them(write_trace, row):
    (call,) = read_trace(write_trace(row))
    assert (call.messages, call.answer) == ((HI,), YES)


def test_a_request_goes_on_with_the_conversation_that_it_begins_with(write_trace):
    other = {"role": "user", "content": "else"}
    rows = [chat(HI, response="yes"), chat(other, response="yes"), chat(HI, YES, MORE, response="no")]
    assert [call.session for call in read_trace(write_trace(*rows))] == ["session 1", "session 2", "session 1"]


def conversations(calls):
    return [call.conversation for call in calls]


def test_prompts_that_go_on_from_one_another_are_one_conversation_each_in_its_own_time(write_trace):
    rows = [block_row(0, 1), block_row(0, 2), block_row(0, 1, 3), block_row(0, 1, 3, 4), block_row(5)]
    calls = read_trace(write_trace(*rows))
    assert conversations(calls) == ["row 0", "row 1", "row 0", "row 0", "row 4"]
    assert len({call.session for call in calls}) == len(rows)


def test_a_beginning_that_many_share_makes_no_conversation_of_them(write_trace):
    rows = [block_row(0), *(block_row(0, 10 + index) for index in range(9)), block_row(0, 10, 50)]
    assert len(set(conversations(read_trace(write_trace(*rows))))) == 10


def test_a_block_that_a_prompt_does_not_fill_is_not_gone_on_from(write_trace):
    partial = {**block_row(0, 1), "input_tokens": 40}
    assert len(set(conversations(read_trace(write_trace(partial, block_row(0, 2), block_row(0, 1, 3)))))) == 1
    assert len(set(conversations(read_trace(write_trace({**partial, "hash_ids": [7, 1]}, block_row(0, 1)))))) == 2


def test_a_conversation_stays_in_one_part_of_a_trace(write_trace):
    rows = [block_row(0, 1), block_row(5, 6), block_row(0, 1, 2), block_row(5, 6, 7), block_row(5, 6, 7, 8)]
    path = write_trace(*rows)
    assert [len(read_trace(path, part=Part(number, 2))) for number in (1, 2)] == [2, 3]
    assert len(read_trace(path, num_sessions=1)) == 2


def test_times_count_from_the_first_request_in_seconds_or_as_dates(write_trace):
    rows = [chat(HI, response="yes", created=each) for each in (1_760_000_000, 1_760_000_030)]
    assert [call.when.arrival_s for call in read_trace(write_trace(*rows))] == [0.0, 30.0]
    rows = [chat(HI, response="yes", timestamp=f"2026-01-01T00:0{each}:00Z") for each in (0, 1)]
    assert [call.when.arrival_s for call in read_trace(write_trace(*rows))] == [0.0, 60.0]


def test_tools_stand_before_the_messages(write_trace):
    (call,) = read_trace(write_trace(chat(HI, response="yes", tools=[{"name": "search"}])))
    assert [message["role"] for message in call.messages] == ["tools", "user"]


def test_a_session_with_nested_agents_says_who_sent_whom_and_who_waited(write_trace):
    agent = {"type": "subagent", "agent_id": "a", "t": 4.0, "requests": [{**REQUEST, "t": 5.0, "hash_ids": [8, 9]}]}
    document = {
        **{"id": "s", "block_size": 64, "tool_tokens": 60, "system_tokens": 10},
        "requests": [REQUEST, agent, {**REQUEST, "t": 9.0, "think_time": 1.5}],
    }
    path = write_trace(json.dumps(document, indent=1), name="s.json")
    first, sub, last = read_trace(path)
    assert (first.session, first.scope, first.message_boundaries) == ("s", "s", (70,))
    assert (sub.session, sub.when) == ("s/a", When(think_s=3.0, parent="s", parent_turn=0))
    assert last.when == When(think_s=1.5, waits_for=("s/a",))


def test_rows_with_streams_are_agents_of_their_session(write_trace):
    row = {"session": "s", "input_tokens": 64, "output_tokens": 1, "hash_runs": [[1, 1]], "block_tokens": 64}
    rows = [
        {**row, "stream": "main", "arrival_s": 0.0, "api_s": 2.0, "think_s": 0.0},
        {**row, "stream": "main/x", "arrival_s": 3.0, "api_s": 1.0, "think_s": 0.0},
        {**row, "stream": "main", "arrival_s": 9.0, "api_s": 2.0, "think_s": 5.0},
    ]
    assert [call.session for call in read_trace(write_trace(*rows), num_sessions=1)] == ["s", "s/x", "s"]


def test_a_trajectory_is_read_from_its_history(write_trace):
    shown = {**YES, "is_demo": True}
    history = [{"role": "system", "content": "s", "agent": "main"}, shown, HI, {**YES, "thought": "t"}, MORE, YES]
    path = write_trace(json.dumps({"history": history, "info": {}}), name="x.traj")
    first, second = read_trace(path)
    assert [message["role"] for message in first.messages] == ["system", "assistant", "user"]
    assert (first.answer, len(second.messages)) == (YES, 5)


def test_a_trajectory_with_queries_is_read_as_it_was_sent(write_trace):
    steps = [{"query": [HI], "response": "yes"}, {"query": [MORE], "response": "no"}]
    first, second = read_trace(write_trace(json.dumps({"trajectory": steps, "history": [HI]}), name="x.traj"))
    assert (first.messages, first.answer["content"], second.messages) == ((HI,), "yes", (MORE,))


@pytest.mark.parametrize(
    "lines", [["Tell me.", "And then?"], ['"Tell me."', '"And then?"'], ['["Tell me.", "And then?"]']]
)
def test_prompts_are_lines_or_texts_in_json(write_trace, lines):
    assert [call.text for call in read_trace(write_trace(*lines))] == ["Tell me.", "And then?"]


def test_a_file_is_unpacked_whatever_it_is_called(write_trace, tmp_path):
    write_trace("Tell me.", name="x.txt.gz").rename(tmp_path / "x.txt")
    assert read_trace(tmp_path / "x.txt")[0].text == "Tell me."


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([chat(HI)], "there is no answer: none of response, output, completion, answer and choices has one"),
        ([chat(HI, response="yes", timestamp="noon")], "timestamp is 'noon', must be seconds or an ISO time"),
        ([chat(YES)], "there is no answer"),
        ([{"block_size": 64, "requests": [{**REQUEST, "in": 0}]}], "request 0: in is 0, must be tokens"),
        ([{"block_size": 0, "requests": []}], "block_size is 0, must be tokens, from 1 to 8,192"),
        ([{"trajectory": [{"query": [], "response": "x"}], "history": []}], "step 0: its query has no messages"),
        (['"x"', "3"], "line 2: it is 3, must be a text"),
        ([{**chat(HI, YES), "messages": [HI, YES]}, {"requests": 3}], "line 2: messages is None"),
    ],
)
def test_what_a_format_must_not_have_is_refused_with_its_place(write_trace, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write_trace(*rows))


def test_a_folder_of_several_formats_is_refused_with_what_was_seen(write_trace, tmp_path):
    write_trace("Tell me.", name="a.txt")
    write_trace(chat(HI, YES), name="b.jsonl")
    with pytest.raises(TraceError, match=r"several formats: prompts in a\.txt, openai in b\.jsonl"):
        read_trace(tmp_path)


def test_a_format_may_be_named_and_must_be_known(write_trace):
    path = write_trace(chat(HI, YES))
    assert len(read_trace(path, format="openai")) == 1
    with pytest.raises(TraceError, match="format is 'csv', must be one of auto, cache-log, calls"):
        read_trace(path, format="csv")
