"""What is asked: sessions of requests, each of which begins when the one before it has been answered."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_engine.bench.serving.client import CHAT, COMPLETIONS, Ask
from hybrid_engine.bench.traces import MessageCall, read_trace
from hybrid_engine.errors import ConfigError, TraceError

WORKLOADS = ("random", "prefix", "agents")
WORDS = """
time year people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story fact
month lot right study book eye job word business issue side kind head house service friend father power hour game line
end member law car city name team minute idea body back parent face level office door health person art war history
party result change morning reason research girl guy moment air teacher force
"""
CHARACTERS_A_TOKEN = 4


@dataclass(frozen=True)
class WorkloadSettings:
    """What is asked, and how much of it. Raises ConfigError for what can't be."""

    kind: str = "random"
    """'random': prompts that share nothing; 'prefix': several questions behind each of some long texts; 'agents': the
    model calls of a trace, turn after turn."""
    num_sessions: int = 64
    """Requests, where each session is one."""
    prompt_words: int = 128
    """Words of a prompt, behind what it shares."""
    answer_tokens: int = 64
    """Most tokens of an answer."""
    num_prefixes: int = 8
    prefix_words: int = 512
    """Words of each text that prompts of the kind 'prefix' share."""
    trace: Path | None = None
    ignore_eos: bool = False
    """Ask for answers of full length; not every server knows how."""
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in WORKLOADS:
            raise ConfigError(f"workload is {self.kind!r}, must be one of {', '.join(WORKLOADS)}")
        for name in ("num_sessions", "prompt_words", "answer_tokens", "num_prefixes", "prefix_words"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}, must be at least 1")
        if (self.trace is not None) != (self.kind == "agents"):
            raise ConfigError(f"workload is {self.kind!r}: 'agents', and no other, needs a trace")


Session = Sequence[Ask]


def make_sessions(settings: WorkloadSettings) -> list[Session]:
    """Return the sessions, the same for the same settings. Raises TraceError for a trace that has no messages."""
    extra: dict[str, Any] = {"ignore_eos": True} if settings.ignore_eos else {}
    if settings.kind == "agents":
        return _agents(settings, extra)
    prompts = _random(settings) if settings.kind == "random" else _prefix(settings)
    common = {"max_tokens": settings.answer_tokens, "temperature": 0.0} | extra
    return [[Ask(COMPLETIONS, {"prompt": prompt} | common)] for prompt in prompts]


def _random(settings: WorkloadSettings) -> Iterator[str]:
    rng = random.Random(settings.seed)
    for number in range(settings.num_sessions):
        yield f"{number} {settings.seed}: {_words(rng, settings.prompt_words)}"


def _prefix(settings: WorkloadSettings) -> Iterator[str]:
    rng = random.Random(settings.seed)
    prefixes = [f"Text {number}: {_words(rng, settings.prefix_words)}" for number in range(settings.num_prefixes)]
    for number in range(settings.num_sessions):
        yield f"{rng.choice(prefixes)} Question {number}: {_words(rng, settings.prompt_words)}"


def _words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choices(WORDS.split(), k=count))


def _agents(settings: WorkloadSettings, extra: dict[str, Any]) -> list[Session]:
    """Ask what a trace's agents asked, as they asked it; answers are as long as theirs were, up to the limit."""
    assert settings.trace is not None
    sessions: dict[str, list[Ask]] = {}
    for call in read_trace(settings.trace, num_sessions=settings.num_sessions):
        if not isinstance(call, MessageCall):
            raise TraceError(f"{settings.trace} has hashes of blocks and no messages: a server can't be asked those")
        body: dict[str, Any] = {
            "messages": [_as_sent(message) for message in call.messages],
            "max_tokens": min(settings.answer_tokens, _num_tokens(call.answer)),
            "temperature": 0.0,
        }
        sessions.setdefault(call.session, []).append(Ask(CHAT, body | extra))
    return list(sessions.values())


def _as_sent(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message of a trace as OpenAI's API has it."""
    known = ("role", "content", "name", "tool_call_id")
    sent = {name: message[name] for name in known if message.get(name) is not None}
    if message.get("tool_calls"):
        sent["tool_calls"] = [_call_as_sent(call, index) for index, call in enumerate(message["tool_calls"])]
    elif "content" not in sent:
        sent["content"] = ""
    return sent


def _call_as_sent(call: Mapping[str, Any], index: int) -> dict[str, Any]:
    function = call.get("function") or {name: call.get(name) for name in ("name", "arguments")}
    return {"id": call.get("id") or f"call_{index}", "type": "function", "function": function}


def _num_tokens(answer: Mapping[str, Any]) -> int:
    rest = {name: value for name, value in answer.items() if name not in ("role", "content") and value}
    text = str(answer.get("content") or "") + (json.dumps(rest) if rest else "")
    return max(len(text) // CHARACTERS_A_TOKEN, 1)
