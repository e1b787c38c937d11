"""`python -m hybrid_engine.bench`: choose a benchmark, show its figures, keep them if asked."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hybrid_engine.bench import report
from hybrid_engine.bench.report import Report

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False)

JsonOption = Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")]
MarkdownOption = Annotated[Path | None, typer.Option("--markdown", help="Write a page for docs/results to this file.")]
ModelOption = Annotated[Path | None, typer.Option(help="A GGUF file; by default the one that the demo extra brings.")]
RoundsOption = Annotated[int, typer.Option(help="Interleaved rounds; the medians are reported.", min=1)]
ThreadsOption = Annotated[int | None, typer.Option(help="Threads of all peers; by default as torch has it.", min=1)]
PeerOption = Annotated[bool, typer.Option(help="Also run transformers, on the same weights and threads.")]


@app.command()
def scheduler(rounds: RoundsOption = 5, json: JsonOption = None, markdown: MarkdownOption = None) -> None:
    """What a step, a prefix lookup and hashing cost in the bookkeeping."""
    from hybrid_engine.bench import scheduler as bench

    _show(bench.run(num_rounds=rounds), json, markdown)


@app.command()
def kernels(
    rounds: RoundsOption = 5, threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None
) -> None:
    """How fast the kernels are beside torch's own operations."""
    from hybrid_engine.bench import kernels as bench

    _show(bench.run(num_rounds=rounds, num_threads=threads), json, markdown)


@app.command()
def engine(
    model: ModelOption = None,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    peers: PeerOption = True,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Whole-engine speed on real weights beside transformers: one request, and eight at once."""
    from hybrid_engine.bench import engine as bench

    _show(bench.run(model=model, num_rounds=rounds, num_threads=threads, with_peers=peers), json, markdown)


@app.command()
def three_kinds(
    rounds: RoundsOption = 3, threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None
) -> None:
    """What a hit saves in a model with full attention, sliding windows and recurrent states."""
    from hybrid_engine.bench import three_kinds as bench

    _show(bench.run(num_rounds=rounds, num_threads=threads), json, markdown)


@app.command(name="all")
def run_all(threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None) -> None:
    """All of the above, one after the other."""
    from hybrid_engine.bench import engine, kernels, scheduler, three_kinds

    runs = (
        scheduler.run(),
        kernels.run(num_threads=threads),
        three_kinds.run(num_threads=threads),
        engine.run(num_threads=threads),
    )
    _show(itertools.chain.from_iterable(runs), json, markdown)


def _show(found: Iterable[Report], json: Path | None, markdown: Path | None) -> None:
    console = Console(width=110)
    reports: list[Report] = []
    for each in found:
        report.print_report(each, console)
        reports.append(each)
    if os.environ.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        console.print("OMP_WAIT_POLICY is not PASSIVE: anything else that runs on this machine distorts the figures")
    if json is not None:
        report.write_json(reports, json)
    if markdown is not None:
        report.write_markdown(reports, markdown, command=_command(sys.argv[1:]))


def _command(arguments: list[str]) -> str:
    """Return the command as anybody can repeat it: where the figures were written to is nobody's concern."""
    kept, rest = [], iter(arguments)
    for argument in rest:
        if argument in ("--json", "--markdown", "--model"):
            next(rest)
        elif not argument.startswith(("--json=", "--markdown=", "--model=")):
            kept.append(argument)
    return shlex.join(["python", "-m", "hybrid_engine.bench", *kept])


if __name__ == "__main__":
    app()
