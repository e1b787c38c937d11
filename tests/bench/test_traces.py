import pytest
from small_traces import SYSTEM, call, user

from hybrid_engine.bench.calls import When
from hybrid_engine.bench.traces import BlockCall, MessageCall, read_trace
from hybrid_engine.errors import TraceError

BLOCKS = {"arrival_s": 0.0, "input_tokens": 700, "output_tokens": 3, "hash_ids": [5, 6], "block_tokens": 512}
RUNS = {**BLOCKS, "session": "s", "hash_ids": None, "hash_runs": [[5, 2]]}
RELEASE = {"timestamp": 27482, "input_length": 700, "output_length": 3, "hash_ids": [5, 6]}


def said(name: str, content: str) -> dict:
    return {"session": "s", "messages": [{"role": "user", "name": name, "content": content}]}


def test_a_delta_extends_the_prompt_and_the_answer_before_it(conversations):
    first, second, *_ = read_trace(conversations)
    assert first == MessageCall("a", (SYSTEM, user("To Rome?")), first.answer)
    assert second.messages == (*first.messages, first.answer, user("At ten, please."))


def test_a_full_prompt_in_a_conversation_replaces_what_was_before(write_trace):
    trace = write_trace(call("a", "full", user("one")), call("a", "full", user("compacted")))
    assert read_trace(trace)[1].messages == (user("compacted"),)


def test_an_answer_may_be_its_text_alone(write_trace):
    (read,) = read_trace(write_trace({**call("a", "full", user("one")), "output": "fine"}))
    assert read.answer == {"role": "assistant", "content": "fine"}


def test_each_message_of_an_agent_is_a_call_of_that_agent(write_trace):
    opening = {**said("human", "Find it."), "system_prompts": {"Expert": "You are one."}}
    trace = write_trace(
        opening, said("Expert", "run this"), said("Computer_terminal", "42"), said("Expert (end)", "Done.")
    )
    first, second = read_trace(trace)
    assert [message["role"] for message in second.messages] == ["system", "user", "assistant", "user"]
    assert first.messages == second.messages[:2]
    assert (first.answer["content"], second.answer["content"]) == ("run this", "Done.")


@pytest.mark.parametrize(("row", "time"), [(BLOCKS, 0.0), (RELEASE, 27.482)], ids=["ours", "as Mooncake released it"])
def test_block_hashes_are_read(write_trace, row, time):
    (call,) = read_trace(write_trace(row))
    assert call == BlockCall("row 0", "", 700, 3, ((5, 2),), 512, when=When(arrival_s=time), conversation="row 0")


def test_runs_of_block_hashes_are_local_to_their_session(write_trace):
    assert read_trace(write_trace(RUNS)) == [BlockCall("s", "s", 700, 3, ((5, 2),), 512)]


def test_ids_that_do_not_follow_each_other_are_runs_of_their_own(write_trace):
    row = {**BLOCKS, "hash_ids": [5, 6, 9, 2], "input_tokens": 2048}
    assert read_trace(write_trace(row))[0].block_runs == ((5, 2), (9, 1), (2, 1))


def test_a_folder_is_read_file_by_file_gzipped_or_not(write_trace, tmp_path):
    write_trace(call("b", "full", user("two")), name="2.jsonl.gz")
    write_trace(call("a", "full", user("one")), name="1.jsonl")
    assert [each.session for each in read_trace(tmp_path)] == ["a", "b"]


def test_only_the_first_sessions_are_kept(conversations):
    assert {each.session for each in read_trace(conversations, num_sessions=1)} == {"a"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "holds no model calls"),
        (["{"], "line 1: no valid JSON"),
        (["[1]"], r"entry 0: the format is not known, it is 1. Known are .*; calls: session, messages and output; "),
        ([{"text": "x"}], r"line 1: the format is not known, the row has \['text'\]"),
        ([{"input_tokens": 3, "output_tokens": 2, "hash_ids": None}], "lengths but no hash_ids"),
        ([call("a", "delta", user("x"))], "extends session 'a', of which there was no call before"),
        ([call("a", "half", user("x"))], "mode is 'half', must be 'full' or 'delta'"),
        ([call("a", "full")], "the prompt has no messages"),
        ([{**call("a", "full", user("x")), "output": 3}], "output is 3, must be a message or its text"),
        ([{**call("a", "full"), "messages": ["x"]}], "messages is .*must be a list of messages"),
        ([BLOCKS, {**BLOCKS, "input_tokens": 0}], "line 2: input_tokens is 0"),
        ([{**BLOCKS, "hash_ids": [1, "x"]}], "hash_ids is .*must be block ids"),
        ([{**BLOCKS, "hash_ids": [1, 2, 3]}], "blocks for 1,536 tokens, the prompt has 700"),
        ([{**BLOCKS, "block_tokens": 10**6}], "block_tokens is 1000000, must be tokens, from 1 to 8,192"),
        ([{**RUNS, "hash_runs": [[1]]}], "hash_runs is .*must be pairs of first id and count"),
    ],
)
def test_a_trace_that_cannot_be_replayed_is_refused_by_file_and_line(write_trace, rows, message):
    with pytest.raises(TraceError, match=message):
        read_trace(write_trace(*rows))


def test_a_trace_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="holds no trace"):
        read_trace(tmp_path)
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(TraceError, match="can't be read"):
        read_trace(tmp_path)
