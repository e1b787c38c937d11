"""`hybrid-engine bench prefix`: the command. Loads nothing heavy until it runs."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from hybrid_engine.errors import ConfigError

if TYPE_CHECKING:
    from hybrid_engine.bench.prefix_bench import MakeRunner
    from hybrid_engine.bench.prefix_result import PrefixReport, RunSettings


WHOLE_TRACE = "1/1"


class RunProgress:
    """A bar for each run, on stderr, where that is a terminal."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._progress = Progress(console=Console(stderr=True), disable=not sys.stderr.isatty())
        self._task: TaskID | None = None

    def __enter__(self) -> RunProgress:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def begin(self, settings: RunSettings) -> None:
        """Show a bar for a run."""
        name = f"{settings.policy}, {settings.memory_bytes / 2**30:,.1f} GiB"
        self._task = self._progress.add_task(name, total=self._num_calls)

    def advance(self) -> None:
        """Count a call."""
        if self._task is not None:
            self._progress.advance(self._task)


def add_prefix(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command(name="prefix")(prefix)


def add_replay(app: typer.Typer) -> None:
    """Add the command to a command line."""
    app.command()(replay)


def replay(
    log: Annotated[Path, typer.Argument(help="What `hybrid-engine serve --cache-log FILE` has written.")],
    memory: Annotated[
        str,
        typer.Option(
            help="Other sizes of the cache memory: like 80GiB, +40GiB (beside what there was), or a share of the "
            "working set, like 50%; several with commas."
        ),
    ] = "",
    policy: Annotated[
        str, typer.Option(help="Eviction policies, clairvoyant among them; several with commas; by default its own.")
    ] = "",
    start: Annotated[
        int | None, typer.Option(help="Which start of the server, from 1; by default the last.", min=1)
    ] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
) -> None:
    """What another 40 GiB of cache, or another eviction policy, would have hit of what a server has answered."""
    from hybrid_engine.bench.log_replay import read_log, replay_log, table

    part = read_log(log, start=start)
    memories, policies = (_names(given) for given in (memory, policy))
    with RunProgress(len(part.calls)) as progress:
        found = replay_log(
            part, memories=memories, policies=policies, on_run=progress.begin, on_request=progress.advance
        )
    console = Console(width=None if sys.stdout.isatty() else 130)
    console.print(table(found))
    console.print(
        f"{len(part.calls):,} answers; an infinite cache would have hit "
        f"{found.report.runs[0].totals.num_infinite_tokens:,} tokens; working set "
        f"{found.report.working_set_bytes / 2**20:,.1f} MiB",
        highlight=False,
    )
    if json is not None:
        found.report.command = _command()
        found.report.write(json)


def _measuring(model: str) -> MakeRunner:
    """Load a model; return what makes its runners."""
    from hybrid_engine.bench.measured import MeasuredRunner, load

    loaded = load(model)
    return lambda coordinator: MeasuredRunner(loaded, coordinator)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _write(report: PrefixReport, path: Path | None) -> None:
    """Write a report, or what there is of one: an hour's runs are not lost with the one that is interrupted."""
    report.command = _command()
    if path is not None:
        report.write(path)


def _command() -> str:
    return shlex.join(["hybrid-engine", *sys.argv[1:]])


def prefix(
    trace: Annotated[
        Path | None, typer.Option(help="A trace, gzipped or not, or a folder of them; see docs/BENCH_PREFIX.md.")
    ] = None,
    workload: Annotated[
        str,
        typer.Option(
            help="Without a trace, what is made up: coding-agent, orchestrator, tool-chat, few-shot, chat; see "
            "docs/WORKLOADS.md."
        ),
    ] = "coding-agent",
    seed: Annotated[int, typer.Option(help="The same seed makes up the same workload.")] = 0,
    format: Annotated[
        str,
        typer.Option(
            help="auto (by what it holds), calls, transcripts, openai, mooncake, blocks, weka, swe-agent, prompts."
        ),
    ] = "auto",
    sessions: Annotated[int | None, typer.Option(help="Only the first so many conversations.", min=1)] = None,
    part: Annotated[
        str,
        typer.Option(
            help="Of a trace: 1/2 takes the first, third, ... conversation, 2/2 the others: choose settings by one "
            "part, report the other."
        ),
    ] = WHOLE_TRACE,
    model: Annotated[
        str,
        typer.Option(
            help="jamba-1.5-mini, granite-4-h-small, gemma-3-27b, llama-3.1-8b (sizes alone), a config.json, or a "
            "folder or .gguf file."
        ),
    ] = "jamba-1.5-mini",
    measured: Annotated[bool, typer.Option(help="Load the model and compute, instead of a clock.")] = False,
    hardware: Annotated[str, typer.Option(help="Whose peak speeds the clock takes: a100, h100, h200, b200, laptop")] = (
        "h200"
    ),
    flops: Annotated[float | None, typer.Option(help="Operations a second, instead of the hardware's.")] = None,
    bandwidth: Annotated[float | None, typer.Option(help="Bytes a second, instead of the hardware's.")] = None,
    memory: Annotated[
        str, typer.Option(help="Cache memory, like 40GiB, or a share of the working set; several with commas.")
    ] = "10%,25%,50%",
    policy: Annotated[
        str, typer.Option(help="Eviction policies: valued, lru, flop_aware, clairvoyant; several with commas.")
    ] = "valued,lru",
    clairvoyant: Annotated[bool, typer.Option(help="Also run who knows the future, to compare with.")] = True,
    concurrency: Annotated[int, typer.Option(help="Conversations at once.", min=1)] = 16,
    pace: Annotated[str, typer.Option(help="trace: arrivals and think times are kept; fast: as fast as it goes.")] = (
        "trace"
    ),
    block_size: Annotated[
        int | None, typer.Option(help="Tokens in a cache block; by default the trace's own, or 16.", min=1)
    ] = None,
    step_tokens: Annotated[int, typer.Option(help="Tokens computed in a step.", min=1)] = 8192,
    checkpoint_interval: Annotated[
        int, typer.Option(help="Tokens between the states that long prompts leave; 0: none.", min=0)
    ] = 4096,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder or .gguf file to tokenise with; by default each byte is a token.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja template to render messages with; by default a plain rendering.")
    ] = None,
    replace_assistant: Annotated[
        bool, typer.Option(help="Prompts show other texts than the assistant wrote, as when reasoning is stripped.")
    ] = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a report with plots to this file, which needs nothing else.")
    ] = None,
) -> None:
    """What a cache would hit of a trace, with which policy and how much memory, and why it misses the rest."""
    from hybrid_engine.bench import prefix_table
    from hybrid_engine.bench.geometry import find_hardware
    from hybrid_engine.bench.prefix_bench import Bench, compare
    from hybrid_engine.bench.traces import Part
    from hybrid_engine.bench.workload_reading import make_workload, read_workload
    from hybrid_engine.tiny_hybrid import find_model

    if html is not None and not (find_spec("matplotlib") and find_spec("jinja2")):
        raise ConfigError("--html needs matplotlib and jinja2: pip install 'hybrid-engine[bench]', or leave it out")
    path = str(find_model(model))
    if trace is None:
        if part != WHOLE_TRACE:
            raise ConfigError("--part is of a trace: give --trace, or another --seed for other made-up conversations")
        items = make_workload(workload, seed=seed, num_sessions=sessions)
    else:
        items = read_workload(
            trace,
            format=format,
            num_sessions=sessions,
            part=Part.parse(part),
            tokenizer=tokenizer or (Path(path) if measured else None),
            chat_template=chat_template,
            replaces_assistant=replace_assistant,
        )
    name = f"{workload}, seed {seed}" if trace is None else trace.resolve().name
    name += f", part {part}" if part != WHOLE_TRACE else ""
    bench = Bench(
        title=f"{name}, {len(items):,} calls" + (", assistant replaced" if replace_assistant else ""),
        items=items,
        model=path,
        memories=_names(memory),
        policies=_names(policy),
        hardware=find_hardware(hardware, flops=flops, bandwidth=bandwidth),
        concurrency=concurrency,
        pace=pace,
        block_size=block_size,
        step_tokens=step_tokens,
        checkpoint_interval=checkpoint_interval,
        with_clairvoyant=clairvoyant,
    )
    with RunProgress(len(items)) as progress:
        make_runner = _measuring(path) if measured else None
        report = compare(
            bench,
            make_runner=make_runner,
            on_run=progress.begin,
            on_request=progress.advance,
            on_memory=lambda so_far: _write(so_far, json),
        )
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(prefix_table.table(report))
    console.print(prefix_table.reasons_table(report))
    console.print(prefix_table.summary(report), highlight=False)
    _write(report, json)
    if html is not None:
        from hybrid_engine.bench.prefix_report.page import write_html

        write_html(report, html)
