"""Replays a trace through /v1/chat/completions, on an engine of three kinds of memory that computes nothing."""

from dataclasses import dataclass

import numpy as np
from live_server import LiveServer
from scripted_engine import ScriptedRunner

from hybrid_engine.bench.prefix_tree import PrefixTree
from hybrid_engine.bench.replay import ReplaySettings, make_groups
from hybrid_engine.bench.serving.client import CHAT
from hybrid_engine.bench.serving.workload import Session
from hybrid_engine.config import CacheConfig, SchedulerConfig
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.engine import Engine
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.scheduler import Scheduler

TEMPLATE = (
    "<|begin|>{% if tools %}<|system|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role if message.role != 'tool' else 'user' }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@dataclass
class Replayed:
    """Prompt tokens of all calls."""

    num_calls: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    """As the usage of each answer says."""
    num_bound: int = 0
    """What a tree of all tokens that were ever computed would find, exact to the token."""
    num_diverged: int = 0


class ChatReplay:
    """A server whose engine answers each prompt with what the trace's model answered."""

    def __init__(self, tokenizer, *, num_blocks: int = 60_000, num_states: int = 20_000) -> None:
        tokenizer.chat_template = TEMPLATE
        groups = make_groups(ReplaySettings(groups="all"))
        counts = [num_states if group.block_size == ENDLESS else num_blocks for group in groups]
        self._answers: dict[tuple, list[int]] = {}
        engine = Engine(
            Scheduler(
                SchedulerConfig(max_num_scheduled_tokens=8192), Coordinator(groups, counts, config=CacheConfig())
            ),
            ScriptedRunner(lambda request: self._answers[tuple(request.token_ids[: request.num_prompt_tokens])]),
            tokenizer,
            vocab_size=len(tokenizer),
            max_model_len=60_000,
        )
        self.server = LiveServer(engine, has_access_log=False)

    def tokens(self, messages, *, invites: bool) -> list[int]:
        body = {"messages": messages, "add_generation_prompt": invites}
        return self.server.post("/tokenize", **body).json()["tokens"]

    def run(self, sessions: list[Session], answers: list[list[dict]]) -> Replayed:
        """answers: of each session, the messages with which its calls were answered."""
        found, tree = Replayed(), PrefixTree()
        for session, messages in zip(sessions, answers, strict=True):
            for ask, answer in zip(session, messages, strict=True):
                self._ask(list(ask.body["messages"]), answer, found, tree)
        return found

    def _ask(self, messages: list[dict], answer: dict, found: Replayed, tree: PrefixTree) -> None:
        prompt, whole = self.tokens(messages, invites=True), self.tokens([*messages, answer], invites=False)
        rest = whole[len(prompt) :] if whole[: len(prompt)] == prompt else [3]
        self._answers[tuple(prompt)] = rest
        response = self.server.post(CHAT, messages=messages, max_tokens=len(rest), explain_cache=True)
        assert response.status_code == 200, response.text
        details = response.json()["usage"]["prompt_tokens_details"]
        # The last token of a prompt is always computed, and that of an answer never is.
        found.num_bound += tree.longest_prefix(np.array(prompt[:-1]))
        tree.add(np.array(prompt + rest[:-1]))
        found.num_calls += 1
        found.num_prompt += len(prompt)
        found.num_cached += details["cached_tokens"]
        found.num_diverged += "diverged" in details
