"""A workload's model calls, one session after the other: who is told what, what comes back, what is thrown away."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from hybrid_engine.bench.generator.context import BlockContext, BlockSource, Context, TokenContext, TokenSource
from hybrid_engine.bench.generator.settings import SubAgents, WorkloadSettings
from hybrid_engine.bench.workload import WorkItem

T = TypeVar("T")


def generate(settings: WorkloadSettings) -> Iterator[WorkItem]:
    """Make the calls of all sessions: in the order in which sessions arrive, each session's calls in their order.

    A sub-agent's calls come before the call of its parent that waits for them. The same settings give the same calls;
    more sessions leave those before as they are.
    """
    workload = _Workload(settings)
    arrival_s = 0.0
    for index in range(settings.num_sessions):
        rng = random.Random(f"{settings.seed}, session {index}")
        arrival_s += rng.expovariate(settings.sessions_per_hour / 3600)
        yield from workload.session(f"session-{index}", arrival_s, rng)


@dataclass
class _AgentType:
    """What sessions of one agent type share."""

    stem: Context
    """System prompt and tools."""
    child_stem: Context | None
    """The same of its sub-agents."""
    openings: list[Context] = field(default_factory=list)
    """The stem and a task, of tasks that other sessions may be given too."""


class _Workload:
    """What is shared between sessions."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self.settings = settings
        self._empty: Context
        if settings.block_tokens is None:
            self._empty = TokenContext(TokenSource(settings.seed, settings.vocabulary_size))
        else:
            self._empty = BlockContext(BlockSource(settings.block_tokens))
        # Drawn before all sessions, so that they do not depend on which come first.
        rng = random.Random(f"{settings.seed}, agent types")
        self._types = [
            [self._make_type(rng) for _ in range(settings.num_agent_types)] for _ in range(settings.num_tenants)
        ]

    def session(self, name: str, arrival_s: float, rng: random.Random) -> Iterator[WorkItem]:
        """Make the calls of a session and of its sub-agents."""
        agent_type = _pick(_pick(self._types, rng), rng)
        resumed, stem = self.settings.resumed, agent_type.stem
        if resumed is not None and rng.random() < resumed.share:
            context, turns = _with_message(stem, resumed.first_tokens.draw_count(rng) - stem.num_tokens), resumed.turns
        else:
            context, turns = self._opening(agent_type, rng), self.settings.turns
        session = _Session(name, self.settings, context, stem_tokens=stem.num_tokens, rng=rng)
        return session.calls(turns.draw_count(rng), child_stem=agent_type.child_stem, arrival_s=arrival_s)

    def _make_type(self, rng: random.Random) -> _AgentType:
        settings, children = self.settings, self.settings.sub_agents
        stem = self._empty.fork()
        stem.append(settings.system_tokens.draw_count(rng))
        if settings.tools_tokens is not None:
            stem.append(settings.tools_tokens.draw_count(rng))
        if children is None:
            return _AgentType(stem, None)
        child_stem = self._empty.fork()
        child_stem.append(children.stem_tokens.draw_count(rng))
        return _AgentType(stem, child_stem)

    def _opening(self, agent_type: _AgentType, rng: random.Random) -> Context:
        """Return stem and first message."""
        settings = self.settings
        is_new = rng.random() < settings.new_task_share or not agent_type.openings
        if not is_new:
            return rng.choice(agent_type.openings).fork()
        opening = _with_message(agent_type.stem, settings.opening_tokens.draw_count(rng))
        if settings.new_task_share < 1:
            agent_type.openings.append(opening.fork())
        return opening


class _Session:
    """One session, of an agent or of a sub-agent, while its calls are made."""

    def __init__(
        self, name: str, settings: WorkloadSettings, context: Context, *, stem_tokens: int, rng: random.Random
    ) -> None:
        self._name = name
        self._settings = settings
        self._context = context
        self._stem_tokens = stem_tokens
        self._rng = rng
        limit = settings.compaction_tokens
        is_large = rng.random() < settings.large_context_share or (limit is not None and context.num_tokens > limit)
        self._limit_tokens = None if is_large else limit
        self._num_children = 0

    def calls(self, num_turns: int, *, child_stem: Context | None = None, **beginning: Any) -> Iterator[WorkItem]:
        """Make this session's calls and, before the calls that wait for them, those of its sub-agents.

        child_stem: what sub-agents begin with; None: there are none. beginning: of the first call, as WorkItem has it.
        """
        prompt_tokens = self._context.num_tokens
        yield self._call(**beginning)
        for turn in range(1, num_turns):
            children = self._send_out(child_stem)
            for child in children:
                assert self._settings.sub_agents is not None
                child_turns = self._settings.sub_agents.turns.draw_count(self._rng)
                yield from child.calls(child_turns, think_s=0.0, parent=self._name, parent_turn=turn - 1)
            think_s = self._hear()
            self._lose(prompt_tokens)
            prompt_tokens = self._context.num_tokens
            yield self._call(think_s=think_s, waits_for=tuple(child._name for child in children))

    def _call(self, **timing: Any) -> WorkItem:
        """Ask with all that there is, and take the answer in."""
        context, settings = self._context, self._settings
        prompt, boundaries = context.prompt(), context.message_boundaries
        num_answer = settings.answer_tokens.draw_count(self._rng)
        num_reasoning = min(round(settings.reasoning_share * num_answer), num_answer - 1)
        answer = context.answer(num_reasoning, num_answer - num_reasoning)
        return WorkItem(self._name, prompt, num_answer, answer, message_boundaries=boundaries, **timing)

    def _send_out(self, child_stem: Context | None) -> list[_Session]:
        settings = self._settings.sub_agents
        if settings is None or child_stem is None or self._rng.random() >= settings.share:
            return []
        return [self._child(settings, child_stem) for _ in range(settings.children.draw_count(self._rng))]

    def _child(self, settings: SubAgents, stem: Context) -> _Session:
        name, self._num_children = f"{self._name}/{self._num_children}", self._num_children + 1
        rng = random.Random(f"{self._settings.seed}, {name}")
        context = _with_message(stem, settings.task_tokens.draw_count(rng))
        return _Session(name, self._settings, context, stem_tokens=stem.num_tokens, rng=rng)

    def _hear(self) -> float:
        """Take in what comes after the answer; return the seconds until it came."""
        settings, rng = self._settings, self._rng
        self._context.append(settings.result_tokens.draw_count(rng))
        if settings.tool_gap_s is not None and rng.random() < settings.tool_share:
            return settings.tool_gap_s.draw(rng)
        return settings.user_think_s.draw(rng)

    def _lose(self, prompt_tokens: int) -> None:
        """Edit or compact what was shown, where it is due. prompt_tokens: of the call before."""
        settings, rng, context = self._settings, self._rng, self._context
        chance = rng.random()
        if chance < settings.rewrite_share:
            context.rewrite(self._stem_tokens)
        elif settings.late_edit_tokens is not None and chance < settings.rewrite_share + settings.late_edit_share:
            num_edited = settings.late_edit_tokens.draw_count(rng)
            context.rewrite(max(self._stem_tokens, prompt_tokens - num_edited))
        if self._limit_tokens is not None and context.num_tokens > self._limit_tokens:
            assert settings.summary_tokens is not None
            context.cut(self._stem_tokens)
            context.append(settings.summary_tokens.draw_count(rng))


def _with_message(stem: Context, num_tokens: int) -> Context:
    context = stem.fork()
    context.append(max(1, num_tokens))
    return context


def _pick(choices: Sequence[T], rng: random.Random) -> T:
    """Return one; the n-th 1 / n times as often as the first."""
    return rng.choices(choices, [1 / rank for rank in range(1, len(choices) + 1)])[0]
