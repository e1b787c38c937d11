"""What `hybrid-engine bench prefix` found, as plain values: in memory, as JSON, and back.

A run is one policy with one memory size on one trace; a report is runs that are to be compared.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from hybrid_engine.errors import TraceError

T = TypeVar("T")
FORMAT = "hybrid-engine bench prefix, version 1"


@dataclass
class RunSettings:
    """With what a run was made."""

    trace: str
    """Its name, in words."""
    model: str
    policy: str
    memory_bytes: int
    """Of all groups together."""
    memory_share: float | None = None
    """Of the working set, where the memory was given so: 0.1 for 10 %."""
    concurrency: int = 1
    """Sessions at once."""
    pace: str = "fast"
    """'trace': arrivals and think times are honoured; 'fast': each call follows at once."""
    hardware: str = ""
    """Whose peak speeds the clock goes by; for a measured run, the device."""
    is_measured: bool = False
    """Whether seconds were measured with real weights; otherwise a roofline clock gives them."""
    block_size: int = 16
    step_tokens: int = 8192
    checkpoint_interval: int = 4096
    max_num_seqs: int = 0
    """Requests that run at once; 0: so many that it hardly matters."""


@dataclass
class Seconds:
    """How some durations are spread."""

    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0


@dataclass
class Totals:
    """Sums over a whole run. Prompt tokens = hit + last + the missed ones of all reasons."""

    num_requests: int = 0
    num_refused: int = 0
    """Prompts that could never fit in the memory; they count nowhere else."""
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_last_tokens: int = 0
    """One of each prompt, always computed."""
    missed_tokens: dict[str, int] = field(default_factory=dict)
    """By reason: never_seen, evicted, missing_state, missing_window, alignment, disabled."""
    num_answer_tokens: int = 0
    num_infinite_tokens: int = 0
    """Hit tokens of a cache that never gives anything up and matches to the token."""
    num_clairvoyant_tokens: int | None = None
    """Hit tokens of the same run where what is given up is chosen by who knows the future; None: it was not run."""
    num_computed_tokens: int = 0
    """Of prompts and answers, those computed again counted again."""
    num_recomputed_tokens: int = 0
    """Of these, computed before and lost by a preemption."""
    num_preemptions: int = 0
    num_steps: int = 0
    ttft_s: Seconds = field(default_factory=Seconds)
    """From the submission of a call to the first token of its answer, waiting included."""
    ttft_quantiles_s: list[float] = field(default_factory=list)
    """The same in full: the 0th, 1st, … 100th percentile; empty where it was not kept."""
    max_orphan_bytes: int = 0
    """Most bytes, at any sample, of cached blocks that no prompt could be resumed with."""
    makespan_s: float = 0.0
    """On the run's own clock, from the first submission to the last token."""
    processor_s: float = 0.0
    """Processor seconds that the run took on this machine."""

    @property
    def hit_rate(self) -> float:
        """Share of the prompt tokens that was hit."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def share_of_infinite(self) -> float:
        """Hit tokens by those of the infinite cache; 1 where nothing could be hit."""
        return self.num_hit_tokens / self.num_infinite_tokens if self.num_infinite_tokens else 1.0

    @property
    def share_of_clairvoyant(self) -> float | None:
        """Hit tokens by those of who knows the future; None: not run. May exceed 1: see docs/BENCH_PREFIX.md."""
        if self.num_clairvoyant_tokens is None:
            return None
        return self.num_hit_tokens / self.num_clairvoyant_tokens if self.num_clairvoyant_tokens else 1.0


@dataclass
class GroupSeries:
    """Bytes of one group at each sample: held + cached + empty is what the group has at that time."""

    name: str
    """Like 'full_attention', 'sliding_window 512', 'mamba'."""
    held_bytes: list[int] = field(default_factory=list)
    """By running requests."""
    cached_bytes: list[int] = field(default_factory=list)
    """Held by nobody, but findable."""
    empty_bytes: list[int] = field(default_factory=list)


@dataclass
class Series:
    """A run over time, in a few hundred samples; entry i of every list belongs to sample i."""

    time_s: list[float] = field(default_factory=list)
    """The run's own clock."""
    num_requests: list[int] = field(default_factory=list)
    """Prompts admitted until then."""
    hit_tokens: list[int] = field(default_factory=list)
    """Of the prompts admitted since the sample before; so are the next two."""
    last_tokens: list[int] = field(default_factory=list)
    missed_tokens: dict[str, list[int]] = field(default_factory=dict)
    """By reason."""
    num_running: list[int] = field(default_factory=list)
    num_waiting: list[int] = field(default_factory=list)
    groups: list[GroupSeries] = field(default_factory=list)
    unowned_bytes: list[int] = field(default_factory=list)
    """Bytes that belong to no group at that time."""


@dataclass
class PrefixRun:
    """One policy, one memory size, one trace."""

    settings: RunSettings
    totals: Totals
    series: Series


@dataclass
class PrefixReport:
    """Runs to be compared, and where they were made."""

    title: str
    runs: list[PrefixRun]
    command: str = ""
    made: str = ""
    """Date and time, UTC."""
    machine: dict[str, str] = field(default_factory=dict)
    working_set_bytes: int = 0
    """What a cache that never gives anything up would hold at the end, over all groups."""

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n"

    def write(self, path: Path) -> None:
        """Write the report to a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json())


def read_report(text: str, *, source: str = "the report") -> PrefixReport:
    """Read what `to_json` gave. Raises TraceError, naming the source and the place, for anything else."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError as error:
        raise TraceError(f"{source}: no valid JSON: {error}") from error
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise TraceError(f"{source}: no report of a prefix benchmark: its format must be {FORMAT!r}")
    del values["format"]
    runs = [_run(run, f"{source}, run {index}") for index, run in enumerate(_list(values, "runs", source))]
    return _made(PrefixReport, {**values, "runs": runs}, source)


def _run(values: Any, where: str) -> PrefixRun:
    parts = _object(values, where)
    totals, series = _object(parts.get("totals"), f"{where}, totals"), _object(parts.get("series"), f"{where}, series")
    groups = [_made(GroupSeries, group, f"{where}, a group") for group in _list(series, "groups", where)]
    ttft = _made(Seconds, totals.get("ttft_s"), f"{where}, ttft_s")
    return PrefixRun(
        _made(RunSettings, parts.get("settings"), f"{where}, settings"),
        _made(Totals, {**totals, "ttft_s": ttft}, f"{where}, totals"),
        _made(Series, {**series, "groups": groups}, f"{where}, series"),
    )


def _made(kind: type[T], values: Any, where: str) -> T:
    given = _object(values, where)
    fields = {each.name: each for each in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if wrong := given.keys() - fields.keys():
        raise TraceError(f"{where}: {', '.join(sorted(wrong))} is not known; there are {', '.join(fields)}")
    needed = {name for name, each in fields.items() if each.default is each.default_factory is dataclasses.MISSING}
    if missing := needed - given.keys():
        raise TraceError(f"{where}: {', '.join(sorted(missing))} is missing")
    return kind(**given)


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TraceError(f"{where}: it is {value!r:.60}, must be an object")
    return value


def _list(values: dict[str, Any], name: str, where: str) -> list[Any]:
    if not isinstance(values.get(name), list):
        raise TraceError(f"{where}: {name} is {values.get(name)!r:.60}, must be a list")
    return values[name]
