"""How a stream is written: what is written once and what again, with the same bytes."""

import asyncio
import json

import pytest

from hybrid_engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from hybrid_engine.server.chat_writer import ChatWriter
from hybrid_engine.server.completions import Writer
from hybrid_engine.server.events import TextEvents, run_until_wait
from hybrid_engine.server.metrics import ServerMetrics
from hybrid_engine.server.parsing.base import PlainParser
from hybrid_engine.server.protocol import ChatBody, CompletionBody

TEXTS = ["first", ' "quoted"\n', "", "\0the text\0", "wörd 🙂", "\ud800 alone", "last"]


def delta(index, text, request_id="x-0"):
    end = "length" if text == TEXTS[-1] else None
    output = CompletionOutput(0, text, [index], finish_reason=end)
    return RequestOutput(request_id, "p", [1, 2], [output], end is not None, RequestMetrics(0.0, 0.0))


def completion_events(**options):
    writer = Writer(CompletionBody(prompt="p", model="m", **options), "x", "the text")
    return writer, lambda each: writer.write([each])


def chat_events(**options):
    body = ChatBody(messages=[{"role": "user", "content": "p"}], model="m", **options)
    writer = ChatWriter(body, "x", "the text", make_parser=PlainParser)
    return writer, writer.events


@pytest.mark.parametrize("make", [completion_events, chat_events])
@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=["plain", "usage"])
def test_events_that_are_written_in_part_are_those_written_whole(make, options):
    (writer, write), (slow, write_whole) = make(**options), make(**options)
    assert writer._has_texts_only
    slow._has_texts_only = False
    for writes in (writer, slow):
        writes._head["created"] = 0
    deltas = [delta(index, text) for index, text in enumerate(TEXTS)]
    assert [write(each) for each in deltas] == [write_whole(each) for each in deltas]


@pytest.mark.parametrize("make", [completion_events, chat_events])
@pytest.mark.parametrize(
    "options", [{"return_token_ids": True}, {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}]
)
def test_what_changes_from_event_to_event_is_written_in_each(make, options):
    _, write = make(**options)
    events = [json.loads(write(delta(index, text)).split(b"data: ")[-1]) for index, text in enumerate(["a", "b", "c"])]
    changing = [(each.get("usage"), each["choices"][0].get("token_ids")) for each in events]
    assert len({str(each) for each in changing}) == 3


def test_a_text_is_put_where_its_place_was_marked():
    events = TextEvents({"model": "\0the text", "text": TextEvents.MARK, "end": None})
    assert events.event('"x"\n') == b'data: {"model":"\\u0000the text","text":"\\"x\\"\\n","end":null}\n\n'


def test_news_are_counted_and_the_time_of_each_token_sorted_into_buckets():
    metrics = ServerMetrics("m")
    metrics.news.note(3)
    metrics.news.note(1, 0.015)
    metrics.news.note(4, 1000.0)
    samples = [sample for metric in metrics.news.collect() for sample in metric.samples]
    lines = {sample.name + sample.labels.get("le", ""): sample.value for sample in samples}
    assert lines["vllm:generation_tokens_total"] == 8
    bucket = "vllm:inter_token_latency_seconds_bucket"
    assert [lines[bucket + limit] for limit in ("0.01", "0.02", "160.0", "640.0", "+Inf")] == [0, 1, 1, 5, 5]
    assert lines["vllm:inter_token_latency_seconds_sum"] == 1000.015


def test_what_need_not_wait_has_ended_at_once_and_what_must_is_ended_by_a_task():
    done = []

    async def send(gate, name):
        if gate is not None:
            await gate.wait()
            await asyncio.sleep(0)
        done.append(name)

    async def use():
        gate = asyncio.Event()
        assert run_until_wait(send(None, "free")) is None
        rest = run_until_wait(send(gate, "blocked"))
        assert done == ["free"]
        gate.set()
        await rest

    asyncio.run(use())
    assert done == ["free", "blocked"]
