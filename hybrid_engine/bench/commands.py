"""`hybrid-engine bench`: choose a benchmark, show its figures, keep them if asked."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from hybrid_engine.bench import report
from hybrid_engine.bench.prefix_command import add_prefix
from hybrid_engine.bench.report import Report
from hybrid_engine.bench.serving import command as serving
from hybrid_engine.options import Quantization

app = typer.Typer(help="Measure what anybody can measure again.", no_args_is_help=True, add_completion=False)
app.command()(serving.serve)

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
def mixes(
    memory: Annotated[str, typer.Option(help="Bytes of cache, like '40GiB'.")] = "40GiB",
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """How many requests run at once on one arena, beside the best split of the memory that a search finds."""
    from hybrid_engine.bench import mixes as bench
    from hybrid_engine.startup import parse_bytes

    memory_bytes = parse_bytes(memory)
    assert memory_bytes is not None, "a text is a size or an error"
    with Progress(transient=True) as progress:
        task = progress.add_task("simulations", total=bench.MOST_RUNS)
        _show(bench.run(memory_bytes=memory_bytes, on_run=lambda: progress.advance(task)), json, markdown)


@app.command()
def kernels(
    rounds: RoundsOption = 5, threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None
) -> None:
    """How fast the kernels are beside torch's own operations."""
    from hybrid_engine.bench import kernels, scans

    runs = (kernels.run(num_rounds=rounds, num_threads=threads), scans.run(num_rounds=rounds, num_threads=threads))
    _show(itertools.chain.from_iterable(runs), json, markdown)


@app.command()
def engine(
    model: ModelOption = None,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    quantization: Quantization = None,
    peers: PeerOption = True,
    llama_cpp: Annotated[
        Path | None,
        typer.Option(help="Also run llama.cpp, if llama_cpp is installed, on this GGUF file of the same model."),
    ] = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Steps beside their floors; whole-engine speed beside others on real weights: one request, and eight at once."""
    from hybrid_engine.bench import engine as bench

    runs = bench.run(
        model=model,
        num_rounds=rounds,
        num_threads=threads,
        quantization=quantization,
        with_peers=peers,
        llama_cpp_file=llama_cpp,
    )
    _show(runs, json, markdown)


@app.command()
def tiers(
    model: ModelOption = None,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """A long session that the caches have given up: new, from host memory, from disk."""
    from hybrid_engine.bench import tiers as bench

    _show(bench.run(model=model, num_rounds=rounds, num_threads=threads), json, markdown)


@app.command()
def speculation(
    model: ModelOption = None,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    num_speculative_tokens: Annotated[int, typer.Option(help="Most tokens guessed ahead in a step.", min=1)] = 5,
    draft_model: Annotated[Path | None, typer.Option(help="A smaller checkpoint that guesses, not n-grams.")] = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Speed with and without tokens guessed ahead, where an answer copies and where it doesn't."""
    from hybrid_engine.bench import speculation as bench
    from hybrid_engine.config import SpeculativeConfig

    method = "ngram" if draft_model is None else "draft_model"
    config = SpeculativeConfig(method, num_speculative_tokens, draft_model)
    _show(bench.run(model=model, num_rounds=rounds, num_threads=threads, speculative=config), json, markdown)


@app.command()
def overhead(rounds: RoundsOption = 40, json: JsonOption = None, markdown: MarkdownOption = None) -> None:
    """What HTTP costs: a server of the tiny hybrid beside `LLM.generate`, in turns."""
    from hybrid_engine.bench import overhead as bench

    _show(bench.run(num_rounds=rounds), json, markdown)


@app.command()
def weights(
    model: ModelOption = None,
    rounds: RoundsOption = 3,
    threads: ThreadsOption = None,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """Weights in 16 and in 8 bits: decode steps beside reading the weights once, and how well prose is predicted."""
    from hybrid_engine.bench import weights as bench

    _show(bench.run(model=model, num_rounds=rounds, num_threads=threads), json, markdown)


@app.command()
def three_kinds(
    rounds: RoundsOption = 3, threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None
) -> None:
    """What a hit saves in a model with full attention, sliding windows and recurrent states."""
    from hybrid_engine.bench import three_kinds as bench

    _show(bench.run(num_rounds=rounds, num_threads=threads), json, markdown)


@app.command()
def gpu(
    models: Annotated[bool, typer.Option(help="Also decode with large random models.")] = True,
    json: JsonOption = None,
    markdown: MarkdownOption = None,
) -> None:
    """The whole GPU suite: ops beside references, floors and peers, and decoding of large random models."""
    from hybrid_engine.startup import check_device

    check_device("cuda")
    from hybrid_engine.bench import gpu as bench

    _show(bench.run(with_models=models), json, markdown)


@app.command(name="all")
def run_all(threads: ThreadsOption = None, json: JsonOption = None, markdown: MarkdownOption = None) -> None:
    """All of the above but the GPU's, one after the other."""
    from hybrid_engine.bench import engine, kernels, scans, scheduler, three_kinds

    runs = (
        scheduler.run(),
        kernels.run(num_threads=threads),
        scans.run(num_threads=threads),
        three_kinds.run(num_threads=threads),
        engine.run(num_threads=threads),
    )
    _show(itertools.chain.from_iterable(runs), json, markdown)


@app.command()
def replay(
    trace: Annotated[Path, typer.Option(help="A file of JSON lines, gzipped or not, or a folder of them.")],
    groups: Annotated[
        str, typer.Option(help="Kinds of memory: full, full+swa, full+state, all; several with commas.")
    ] = "full+state,all",
    sessions: Annotated[int | None, typer.Option(help="Only the first so many conversations.", min=1)] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="A folder or .gguf file to tokenise with; by default each byte is a token.")
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="A Jinja template to render messages with; by default a plain rendering.")
    ] = None,
    replace_assistant: Annotated[
        bool, typer.Option(help="Prompts show other texts than the assistant wrote, as when reasoning is stripped.")
    ] = False,
    memory: Annotated[
        str | None, typer.Option(help="For all groups, like 2GiB; by default so much that nothing is given up.")
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Conversations at once.", min=1)] = 1,
    block_size: Annotated[int, typer.Option(help="Tokens in a cache block.", min=1)] = 16,
    window: Annotated[int, typer.Option(help="Tokens that a sliding window sees.", min=1)] = 512,
    step_tokens: Annotated[int, typer.Option(help="Tokens computed in a step.", min=1)] = 8192,
    checkpoint_interval: Annotated[
        int, typer.Option(help="Tokens between the states that long prompts leave; 0: none.", min=0)
    ] = 4096,
    json: JsonOption = None,
) -> None:
    """Replay a trace through coordinator and scheduler, with a runner that computes nothing: what would be hit.

    Formats: model calls as messages, transcripts between agents, hashes of blocks (Mooncake and the like).
    """
    from hybrid_engine.bench import replay_report
    from hybrid_engine.bench.rendering import renderer_maker
    from hybrid_engine.bench.replay import ReplaySettings, replay
    from hybrid_engine.bench.traces import read_trace
    from hybrid_engine.startup import parse_bytes

    kinds = [
        ReplaySettings(
            groups=kind.strip(),
            memory_bytes=parse_bytes(memory),
            block_size=block_size,
            window=window,
            concurrency=concurrency,
            step_tokens=step_tokens,
            checkpoint_interval=checkpoint_interval,
        )
        for kind in groups.split(",")
    ]
    calls = read_trace(trace, num_sessions=sessions)
    make_renderer = renderer_maker(tokenizer, chat_template, replaces_assistant=replace_assistant)
    title = f"{trace.resolve().name}, {len(calls):,} calls" + (", assistant replaced" if replace_assistant else "")
    results = []
    with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        for settings in kinds:
            task = progress.add_task(settings.groups, total=len(calls))
            results.append(replay(calls, make_renderer, settings, on_request=partial(progress.advance, task)))
    Console(width=None if sys.stdout.isatty() else 110).print(replay_report.table(results, title=title))
    if json is not None:
        replay_report.write_json(results, json, trace=title)


# Its options are many, and stand in a file of their own.
add_prefix(app)


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
    # `hybrid-engine bench` is the same program.
    kept, rest = [], iter(arguments[1:] if arguments[:1] == ["bench"] else arguments)
    for argument in rest:
        if argument in ("--json", "--markdown", "--model", "--llama-cpp"):
            next(rest)
        elif not argument.startswith(("--json=", "--markdown=", "--model=", "--llama-cpp=")):
            kept.append(argument)
    return shlex.join(["python", "-m", "hybrid_engine.bench", *kept])
