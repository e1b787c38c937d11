"""Agents' conversations through the chat endpoint hit nearly all that could be hit, and the usage says so.

HYBRID_ENGINE_TRACE may name a trace of messages to replay instead of the one made here.
"""

import json
import os
import random
from pathlib import Path

import pytest
from chat_replay import ChatReplay
from small_traces import call, user

from hybrid_engine import tiny_hybrid
from hybrid_engine.bench.serving.workload import WORDS, WorkloadSettings, _as_sent, make_sessions
from hybrid_engine.bench.traces import read_trace
from hybrid_engine.tokenizer import load_tokenizer

NUM_SESSIONS = int(os.environ.get("HYBRID_ENGINE_TRACE_SESSIONS", "200"))


def text(rng: random.Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=num_words))


def make_trace(path: Path) -> None:
    """Write what agents with one long policy ask: tools are called, one agent edits its past, one task comes twice."""
    rng = random.Random(5)
    policy = {"role": "system", "content": text(rng, 900)}
    lookup = {"name": "look_up", "arguments": '{"id": "x4"}'}
    rows = []
    for number in range(6):
        task = random.Random(number % 5)
        rows.append(call(f"s{number}", "full", policy, user(text(task, 40)), answer=text(task, 30)))
        for turn in range(4):
            called = {"role": "assistant", "content": None, "tool_calls": [lookup]}
            result = {"role": "tool", "content": text(task, 60)}
            rows.append(call(f"s{number}", "delta", called, result, user(f"{turn}?"), answer=text(task, 25)))
    edited = [policy, user("begin"), {"role": "assistant", "content": "cut short"}, user("and now?")]
    rows.append(call("edited", "full", policy, user("begin"), answer=text(rng, 50)))
    rows.append(call("edited", "full", *edited, answer="Done."))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.timeout(3000)
def test_agents_hit_what_could_be_hit_and_the_usage_is_the_engines_own(tmp_path):
    trace = Path(os.environ.get("HYBRID_ENGINE_TRACE", tmp_path / "calls.jsonl"))
    if not trace.exists():
        make_trace(trace)
    sessions = make_sessions(WorkloadSettings("agents", trace=trace, num_sessions=NUM_SESSIONS))
    answers: dict[str, list[dict]] = {}
    for each in read_trace(trace, num_sessions=NUM_SESSIONS):
        answers.setdefault(each.session, []).append(_as_sent(each.answer))
    replay = ChatReplay(load_tokenizer(Path(tiny_hybrid.find_model(tiny_hybrid.NAME))))
    try:
        found = replay.run(sessions, list(answers.values()))
        counted = replay.server.metric("vllm:prompt_tokens_cached_total")
        hits = replay.server.metric("vllm:prefix_cache_hits_total")
    finally:
        replay.server.stop()
    print(f"{found}, {found.num_cached / found.num_bound:.2%} of the bound")
    assert found.num_cached == counted == hits
    assert found.num_cached >= 0.95 * found.num_bound
