"""`hybrid-engine bench prefix`: one workload with each policy and memory size, beside what could be hit at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from hybrid_engine.bench.future import ClairvoyantPolicy, Future
from hybrid_engine.bench.geometry import CONFIGS, HARDWARE, Geometry, Hardware, RooflineClock, describe
from hybrid_engine.bench.prefix_result import PrefixReport, PrefixRun, RunSettings
from hybrid_engine.bench.prefix_run import (
    DEFAULT_POLICY,
    PACES,
    UNLIMITED,
    ModelledRunner,
    Needs,
    Run,
    Runner,
    make_coordinator,
    survey,
)
from hybrid_engine.bench.report import machine_facts
from hybrid_engine.bench.workload import WorkItem
from hybrid_engine.config import EVICTION_POLICIES
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.errors import ConfigError
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.startup import parse_bytes, read_model_config

CLAIRVOYANT = "clairvoyant"
DEFAULT_BLOCK_TOKENS = 16

MakeRunner = Callable[[Coordinator], Runner]


@dataclass(frozen=True)
class Bench:
    """What is to be compared."""

    title: str
    """The workload's name, in words."""
    items: Sequence[WorkItem]
    model: str = "jamba-1.5-mini"
    """A name of geometry.CONFIGS, or the path of a config.json, a folder or a .gguf file."""
    memories: Sequence[str] = ("10%", "25%", "50%")
    """Sizes like '40GiB', or shares of the working set."""
    policies: Sequence[str] = ("valued", "lru")
    """Names of eviction policies, 'clairvoyant' among them if that is to have runs of its own."""
    hardware: Hardware = HARDWARE["h200"]
    concurrency: int = 16
    pace: str = "trace"
    block_size: int | None = None
    """Tokens in a block; None: that of the trace's blocks, or 16."""
    step_tokens: int = 8192
    checkpoint_interval: int = 4096
    with_clairvoyant: bool = True
    """Whether the clairvoyant bound is found for each memory size: a run more."""

    def __post_init__(self) -> None:
        check_policies(self.policies)
        if self.pace not in PACES:
            raise ConfigError(f"pace is {self.pace!r}, must be {' or '.join(PACES)}")
        if self.concurrency < 1:
            raise ConfigError(f"concurrency is {self.concurrency}, must be at least 1 session")
        if self.step_tokens < 1:
            raise ConfigError(f"step_tokens is {self.step_tokens}, must be at least 1")

    @property
    def num_runs(self) -> int:
        """Runs that `compare` makes."""
        extra = self.with_clairvoyant and CLAIRVOYANT not in self.policies
        return len(self.memories) * (len(self.policies) + extra)


def compare(
    bench: Bench,
    *,
    make_runner: MakeRunner | None = None,
    on_run: Callable[[RunSettings], object] = lambda settings: None,
    on_request: Callable[[], object] = lambda: None,
    on_memory: Callable[[PrefixReport], object] = lambda report: None,
) -> PrefixReport:
    """Make all runs and return what was found.

    make_runner: what runs steps; None: a roofline clock that computes nothing. on_run is told of each run before it
    starts, on_request of each of its calls that has ended, on_memory of the report so far when all runs of a memory
    size are in it.
    """
    needs = survey(bench.items)
    geometry = find_geometry(bench.model, block_size=_block_size(bench, needs))
    working_set_bytes = needs.working_set_bytes(geometry)
    settings = RunSettings(
        trace=bench.title,
        model=geometry.name,
        policy="",
        memory_bytes=0,
        concurrency=bench.concurrency,
        pace=bench.pace,
        hardware=bench.hardware.name if make_runner is None else "measured",
        is_measured=make_runner is not None,
        block_size=_block_size(bench, needs),
        step_tokens=bench.step_tokens,
        checkpoint_interval=bench.checkpoint_interval,
    )

    def make(chosen: RunSettings, policy: EvictionPolicy | None) -> Coordinator:
        return make_coordinator(geometry, chosen, needs, policy)

    clock = RooflineClock(geometry, bench.hardware)
    replays = Replays(
        bench.items, make, make_runner or (lambda coordinator: ModelledRunner(clock)), on_request=on_request
    )

    def run(policy: str, memory_bytes: int, share: float | None) -> PrefixRun:
        chosen = replays.settings(settings, policy=policy, memory_bytes=memory_bytes, share=share)
        on_run(chosen)
        return replays.run(chosen)

    report = PrefixReport(
        title=bench.title,
        runs=[],
        made=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine_facts(),
        working_set_bytes=working_set_bytes,
    )
    for memory in bench.memories:
        memory_bytes, share = parse_memory(memory, working_set_bytes)
        runs = [run(policy, memory_bytes, share) for policy in bench.policies]
        if bench.with_clairvoyant:
            bound = next((each for each in runs if each.settings.policy == CLAIRVOYANT), None)
            bound = bound or run(CLAIRVOYANT, memory_bytes, share)
            for each in runs:
                each.totals.num_clairvoyant_tokens = bound.totals.num_hit_tokens
        report.runs += runs
        on_memory(report)
    return report


class Replays:
    """A workload that is replayed again and again; what is to come of it is found out once."""

    def __init__(
        self,
        items: Sequence[WorkItem],
        make: Callable[[RunSettings, EvictionPolicy | None], Coordinator],
        make_runner: MakeRunner,
        *,
        on_request: Callable[[], object] = lambda: None,
    ) -> None:
        """make: the coordinator of a run, with a policy instead of the one that the settings name."""
        self._items = items
        self._make = make
        self._make_runner = make_runner
        self._on_request = on_request
        self._future: Future | None = None

    @staticmethod
    def settings(common: RunSettings, *, policy: str, memory_bytes: int, share: float | None) -> RunSettings:
        """Return the settings of one run."""
        return replace(common, policy=policy, memory_bytes=memory_bytes, memory_share=share)

    def run(self, settings: RunSettings) -> PrefixRun:
        """Replay it once, with the settings' policy or by who knows what is to come."""
        future = self._find_future(settings) if settings.policy == CLAIRVOYANT else None
        coordinator = self._make(settings, ClairvoyantPolicy(future) if future else None)
        runner = self._make_runner(coordinator)
        return Run(self._items, settings, coordinator, runner, future=future, on_request=self._on_request).run()

    def _find_future(self, settings: RunSettings) -> Future:
        """Replay it with unlimited memory, the first time; begin again."""
        if self._future is None:
            self._future = Future()
            ample = replace(settings, memory_bytes=UNLIMITED, policy=DEFAULT_POLICY)
            coordinator = self._make(ample, None)
            Run(self._items, ample, coordinator, self._make_runner(coordinator), recorded=self._future).run()
        self._future.restart()
        return self._future


def check_policies(policies: Sequence[str]) -> None:
    """Raise ConfigError for a name that no policy has."""
    known = (*EVICTION_POLICIES, CLAIRVOYANT)
    if unknown := [policy for policy in policies if policy not in known]:
        raise ConfigError(f"policy is {unknown[0]!r}, must be one of {', '.join(known)}")


def find_geometry(model: str, *, block_size: int) -> Geometry:
    """Return a model's sizes, by its name or from its config. Raises CheckpointError or ConfigError."""
    if model in CONFIGS:
        return describe(model, CONFIGS[model], block_size=block_size)
    path = Path(model)
    if not path.exists():
        raise ConfigError(f"model is {model!r}, must be one of {', '.join(CONFIGS)}, or a path with a config.json")
    name = path.parent.name if path.name == "config.json" else path.stem
    return describe(name or model, read_model_config(path), block_size=block_size)


def parse_memory(text: str, working_set_bytes: int) -> tuple[int, float | None]:
    """Read '40GiB' or '10%' into bytes and, where it was one, the share of the working set."""
    given = text.strip()
    if not given.endswith("%"):
        found = parse_bytes(given)
        assert found is not None
        return found, None
    try:
        share = float(given[:-1]) / 100
    except ValueError as error:
        raise ConfigError(f"{text!r} is no share of the working set, must be like '25%'") from error
    if not 0 < share <= 10:
        raise ConfigError(f"{text!r} is out of range, must be above 0 % and at most 1,000 %")
    return int(share * working_set_bytes), share


def _block_size(bench: Bench, needs: Needs) -> int:
    if needs.block_tokens is None:
        return bench.block_size or DEFAULT_BLOCK_TOKENS
    if bench.block_size is not None and bench.block_size % needs.block_tokens:
        raise ConfigError(
            f"block_size is {bench.block_size}, must be a multiple of {needs.block_tokens}: the trace knows prompts by "
            f"blocks of that many tokens"
        )
    return bench.block_size or needs.block_tokens
