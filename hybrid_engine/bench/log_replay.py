"""`hybrid-engine replay`: what a server would have hit with other memory or another policy, from its own log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from rich.table import Table

from hybrid_engine.bench.cache_logs import LoggedCall, LogPart, read_parts
from hybrid_engine.bench.geometry import geometry_of
from hybrid_engine.bench.prefix_bench import Replays, check_policies, parse_memory
from hybrid_engine.bench.prefix_result import PrefixReport, PrefixRun, RunSettings
from hybrid_engine.bench.prefix_run import ModelledRunner, make_coordinator, survey
from hybrid_engine.bench.rendering import Renderer, load_encoder
from hybrid_engine.bench.traces import rows_of
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError, TraceError
from hybrid_engine.groups.eviction import EvictionPolicy

AS_IT_WAS = "as it was"


@dataclass(frozen=True)
class LogReplay:
    """A log, and what its server's cache hits in replays; the first one is the cache as it was."""

    part: LogPart
    report: PrefixReport

    @property
    def num_logged_hit_tokens(self) -> int:
        """What the server itself had hit, where the log knows."""
        return sum(logged.hit or 0 for logged in self.part.calls)

    @property
    def num_logged_prompt_tokens(self) -> int:
        """Tokens of the prompts of which it is known."""
        return sum(logged.call.num_prompt_tokens for logged in self.part.calls if logged.hit is not None)


class SteadyClock:
    """Says how long a step takes by what the server itself took: so much a token, and so much at the least."""

    def __init__(self, calls: Sequence[LoggedCall]) -> None:
        computed = [
            logged.ttft_s / (logged.call.num_prompt_tokens - logged.hit)
            for logged in calls
            if logged.ttft_s is not None and logged.hit is not None
        ]
        decoded = [
            (logged.total_s - logged.ttft_s) / (logged.call.num_answer_tokens - 1)
            for logged in calls
            if logged.ttft_s is not None and logged.call.num_answer_tokens > 1
        ]
        self.token_s = max(0.0, median(computed)) if computed else 0.0
        self.step_s = max(0.0, median(decoded)) if decoded else 0.0

    def seconds(self, positions: Sequence[int], num_new: Sequence[int], num_sampled: int) -> float:
        """Return how long a step takes that computes so many tokens of each request."""
        return max(self.step_s, self.token_s * (sum(num_new) - num_sampled))


def read_log(path: Path, *, start: int | None = None) -> LogPart:
    """Return what one start of the server logged, the last one by default.

    Raises TraceError for what is no cache log, ConfigError for a start that isn't there.
    """
    parts = read_parts(rows_of(path))
    if not parts:
        raise TraceError(f"{path} is empty: give the file that `hybrid-engine serve --cache-log FILE` has written")
    if start is not None and not 1 <= start <= len(parts):
        raise ConfigError(f"start is {start}, must be from 1 to {len(parts)}: so often was the server started")
    part = parts[-1 if start is None else start - 1]
    if not part.calls:
        raise TraceError(f"{path} holds no answers after {part.header.where}: let the server answer some first")
    return part


def replay_log(
    part: LogPart,
    *,
    memories: Sequence[str],
    policies: Sequence[str] = (),
    on_run: Callable[[RunSettings], object] = lambda settings: None,
    on_request: Callable[[], object] = lambda: None,
) -> LogReplay:
    """Replay a log with the cache as it was, then with each memory size and policy.

    memories: like '80GiB', '+40GiB' (beside what there was), or '50%' of the working set. policies: by default the
    server's own.
    """
    own_policy = str(part.header.values.get("eviction_policy", "lru"))
    check_policies(policies)
    items = [Renderer(load_encoder(None)).item(logged.call) for logged in part.calls]
    needs = survey(items)
    geometry = geometry_of(str(part.header.values.get("model", "")), part.specs())
    working_set_bytes, own_bytes = needs.working_set_bytes(geometry), part.count("memory_bytes")
    settings = RunSettings(
        trace=part.header.where,
        model=geometry.name,
        policy=own_policy,
        memory_bytes=own_bytes,
        # All that came came: nobody waited for a place among conversations.
        concurrency=len(items),
        max_num_seqs=part.count("max_num_seqs"),
        pace="trace",
        hardware="as logged",
        block_size=part.count("block_size"),
        step_tokens=part.count("step_tokens"),
        checkpoint_interval=part.count("checkpoint_interval"),
    )

    def make(chosen: RunSettings, policy: EvictionPolicy | None) -> Coordinator:
        return make_coordinator(geometry, chosen, needs, policy)

    clock = SteadyClock(part.calls)
    replays = Replays(items, make, lambda coordinator: ModelledRunner(clock), on_request=on_request)

    def run(memory_bytes: int, share: float | None, policy: str) -> PrefixRun:
        chosen = replays.settings(settings, policy=policy, memory_bytes=memory_bytes, share=share)
        on_run(chosen)
        return replays.run(chosen)

    runs = [run(own_bytes, None, own_policy)]
    for memory in memories or [str(own_bytes)]:
        memory_bytes, share = _memory(memory, own_bytes, working_set_bytes)
        runs += [
            run(memory_bytes, share, policy)
            for policy in policies or (own_policy,)
            if (memory_bytes, policy) != (own_bytes, own_policy)
        ]
    return LogReplay(part, PrefixReport(settings.trace, runs, working_set_bytes=working_set_bytes))


def _memory(text: str, own_bytes: int, working_set_bytes: int) -> tuple[int, float | None]:
    if not text.strip().startswith("+"):
        return parse_memory(text, working_set_bytes)
    more, _ = parse_memory(text.strip()[1:], working_set_bytes)
    return own_bytes + more, None


def table(replay: LogReplay) -> Table:
    """Return what each cache would have hit, beside what the server did."""
    as_it_was = replay.report.runs[0].totals
    shown = Table(title="What another cache would have hit", title_justify="left")
    for name in ("memory", "policy"):
        shown.add_column(name)
    for name in ("hit tokens", "hit rate", "of infinite", "computed, beside it", "TTFT p50", "p90"):
        shown.add_column(name, justify="right")
    rate = replay.num_logged_hit_tokens / max(1, replay.num_logged_prompt_tokens)
    shown.add_row("logged by the server", "", f"{replay.num_logged_hit_tokens:,}", f"{rate:.2%}", "", "", "", "")
    for index, run in enumerate(replay.report.runs):
        totals = run.totals
        share = run.settings.memory_share
        size = _size(run.settings.memory_bytes) + ("" if share is None else f" ({100 * share:g} %)")
        shown.add_row(
            f"{size}, {AS_IT_WAS}" if index == 0 else size,
            run.settings.policy,
            f"{totals.num_hit_tokens:,}",
            f"{totals.hit_rate:.2%}",
            f"{totals.share_of_infinite:.2%}",
            f"{totals.num_computed_tokens - as_it_was.num_computed_tokens:+,}",
            f"{totals.ttft_s.p50:,.3f} s",
            f"{totals.ttft_s.p90:,.3f} s",
        )
    return shown


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.2f} MiB"
