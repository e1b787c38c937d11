"""What a generated workload is like. Every field says what it stands for; presets.py has values."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hybrid_engine.bench.generator.distributions import LogNormal
from hybrid_engine.errors import ConfigError

MAX_BLOCK_TOKENS = 8192


@dataclass(frozen=True)
class SubAgents:
    """Child sessions that a call sends out; the call after it waits for their reports."""

    share: float
    """Share of the calls that send out any."""
    children: LogNormal
    """How many at once."""
    stem_tokens: LogNormal
    """System prompt and tools of a child, drawn once for each agent type: siblings share them, parents do not."""
    task_tokens: LogNormal
    """What the child is told."""
    turns: LogNormal
    """Calls of a child."""


@dataclass(frozen=True)
class Resumed:
    """Sessions that went on elsewhere before."""

    share: float
    """Of all sessions."""
    first_tokens: LogNormal
    """Their first prompt, stem included."""
    turns: LogNormal
    """Their calls."""


@dataclass(frozen=True)
class WorkloadSettings:
    """Sessions of agents: how many, how they begin, what each call adds, how they break, when calls come."""

    system_tokens: LogNormal
    """System prompt, drawn once for each agent type."""
    tools_tokens: LogNormal | None
    """Descriptions of tools (or worked examples) right behind it, drawn once for each agent type; None: none."""
    opening_tokens: LogNormal
    """What a session begins with: the user's first message and what is shown with it."""
    turns: LogNormal
    """Calls of a session."""
    answer_tokens: LogNormal
    """What the model writes, reasoning included."""
    result_tokens: LogNormal
    """What the next prompt has behind that answer: a tool's result, or what the user says next."""
    user_think_s: LogNormal
    """Seconds until the user has answered."""
    reasoning_share: float = 0.0
    """Share of the answer that is reasoning. It comes first and is stripped from what later prompts show."""
    tool_share: float = 0.0
    """Share of the answers that call a tool; after the others the user speaks."""
    tool_gap_s: LogNormal | None = None
    """Seconds that a tool takes."""
    resumed: Resumed | None = None
    """Sessions whose first prompt has a history already; None: there are none."""
    new_task_share: float = 1.0
    """Share of the sessions that open with what no session of their agent type opened with; the others take an
    earlier opening."""
    late_edit_share: float = 0.0
    """Share of the calls whose prompt leaves the one before near its end: a reminder is moved, a result is cut."""
    late_edit_tokens: LogNormal | None = None
    """How far before the end of the previous prompt these leave it."""
    rewrite_share: float = 0.0
    """Share of the calls whose prompt leaves the one before right behind system prompt and tools: an early turn
    was edited, and nothing after it counts."""
    compaction_tokens: int | None = None
    """A longer prompt is compacted: its history is replaced by a summary. None: never."""
    large_context_share: float = 0.0
    """Share of the sessions that are not compacted, as their model has a larger context. So has that of a session
    which is resumed with more than compaction_tokens."""
    summary_tokens: LogNormal | None = None
    """The summary, and what is shown again with it."""
    sub_agents: SubAgents | None = None
    num_agent_types: int = 1
    """Of each tenant, each with a system prompt and tools of its own; the n-th is taken 1 / n times as often as the
    first."""
    num_tenants: int = 1
    """They share nothing; the n-th has 1 / n times as many sessions as the first."""
    sessions_per_hour: float = 60.0
    """Sessions arrive as a Poisson process."""
    num_sessions: int = 100
    """Besides those of sub-agents."""
    block_tokens: int | None = 64
    """Prompts are told as identities of blocks of so many tokens; None: as token ids, for short prompts."""
    vocabulary_size: int = 32_000
    """Token ids are below it and above 0."""
    seed: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_share") and not 0 <= value <= 1:
                raise ConfigError(f"{field.name} is {value:g}, must be from 0 to 1")
            if field.name.startswith("num_") and value < 1:
                raise ConfigError(f"{field.name} is {value}, must be at least 1")
        for needed, by in (
            ("tool_gap_s", "tool_share"),
            ("late_edit_tokens", "late_edit_share"),
            ("summary_tokens", "compaction_tokens"),
        ):
            if getattr(self, by) and getattr(self, needed) is None:
                raise ConfigError(f"{by} is {getattr(self, by):g} and {needed} None: give both, or set {by} to none")
        if self.block_tokens is not None and not 1 <= self.block_tokens <= MAX_BLOCK_TOKENS:
            raise ConfigError(f"block_tokens is {self.block_tokens}, must be from 1 to {MAX_BLOCK_TOKENS:,}, or None")
        if self.vocabulary_size < 2:
            raise ConfigError(f"vocabulary_size is {self.vocabulary_size}, must be at least 2")
        if self.sessions_per_hour <= 0:
            raise ConfigError(f"sessions_per_hour is {self.sessions_per_hour:g}, must be above 0")
