"""`hybrid-engine bench serve`."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from hybrid_engine.bench import report
from hybrid_engine.bench.serving.drive import DriveSettings, connect, drive
from hybrid_engine.bench.serving.figures import figures, medians, parse_slo, ratio_line, table
from hybrid_engine.bench.serving.workload import WorkloadSettings, make_sessions
from hybrid_engine.errors import ConfigError

Figures = dict[str, list[dict[str, Any]]]
"""Of each server, by its address, those of each round."""


def serve(
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:8000",
    peer_url: Annotated[
        list[str] | None, typer.Option(help="Another server of any kind, asked in turns; may be given several times.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="By default the first that the server has.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a bearer token.")] = None,
    workload: Annotated[
        str, typer.Option(help="random: prompts that share nothing; prefix: that share texts; agents: a trace's.")
    ] = "random",
    trace: Annotated[Path | None, typer.Option(help="For agents: a file of JSON lines of model calls.")] = None,
    num_sessions: Annotated[
        int, typer.Option("--num-prompts", "--num-sessions", help="Sessions; each is one request, or one agent.")
    ] = 64,
    prompt_words: Annotated[int, typer.Option(help="Words of a prompt, behind what it shares.")] = 128,
    answer_tokens: Annotated[int, typer.Option("--max-tokens", help="Most tokens of an answer.")] = 64,
    num_prefixes: Annotated[int, typer.Option(help="Texts that prompts share.")] = 8,
    prefix_words: Annotated[int, typer.Option(help="Words of each of them.")] = 512,
    ignore_eos: Annotated[bool, typer.Option(help="Ask for answers of full length.")] = False,
    concurrency: Annotated[
        int | None,
        typer.Option("--max-concurrency", "--concurrency", help="Sessions at once (8; with a rate: no limit)."),
    ] = None,
    request_rate: Annotated[
        float | None, typer.Option(help="Sessions that arrive in a second, at random; by default as others end.")
    ] = None,
    think_time: Annotated[float, typer.Option(help="Seconds between an answer and an agent's next request.")] = 0.0,
    warmups: Annotated[int, typer.Option("--num-warmups", help="Requests before, not counted.", min=1)] = 1,
    goodput: Annotated[
        list[str] | None, typer.Option(help="A limit like ttft:500 (milliseconds) that good requests keep.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds, the servers in turns; medians are shown.", min=1)] = 1,
    timeout: Annotated[float, typer.Option(help="Seconds that one request may take.")] = 600.0,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals; each round has prompts of its own.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures to this file.")] = None,
) -> None:
    """Measure a server over HTTP, alone or beside others: waiting times, throughput, goodput, cached tokens."""
    limits = parse_slo(goodput or ())
    asked = WorkloadSettings(
        workload,
        num_sessions=num_sessions,
        prompt_words=prompt_words,
        answer_tokens=answer_tokens,
        num_prefixes=num_prefixes,
        prefix_words=prefix_words,
        trace=trace,
        ignore_eos=ignore_eos,
        seed=seed,
    )
    settings = DriveSettings(
        concurrency=concurrency or (8 if request_rate is None else None),
        sessions_per_second=request_rate,
        think_seconds=think_time,
        num_warmup=warmups,
        timeout_seconds=timeout,
        seed=seed,
    )
    urls = [url, *(peer_url or ())]
    found = asyncio.run(_measure(urls, model, api_key, asked, settings, limits, rounds))
    shown = {each: medians(runs) for each, runs in found.items()}
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.print(table(shown, title=f"{workload}, {num_sessions} sessions, {rounds} rounds"))
    for peer in urls[1:]:
        console.print(ratio_line(found[url], found[peer], peer), markup=False, highlight=False)
    for each, columns in shown.items():
        for error, count in columns["errors"].items():
            console.print(f"{each}: {count} times {error}", markup=False, highlight=False)
    if json_file is not None:
        _write(json_file, found, {"workload": asdict(asked), "drive": asdict(settings), "goodput": limits})
    if not any(columns["completed"] for columns in shown.values()):
        raise ConfigError("no request was answered; what went wrong stands above")


async def _measure(
    urls: Sequence[str],
    model: str | None,
    api_key: str | None,
    asked: WorkloadSettings,
    settings: DriveSettings,
    limits: dict[str, float],
    num_rounds: int,
) -> Figures:
    found: Figures = {url: [] for url in urls}
    async with AsyncExitStack() as stack:
        servers = {
            url: await stack.enter_async_context(
                connect(url, model=model, api_key=api_key, timeout_seconds=settings.timeout_seconds)
            )
            for url in urls
        }
        # Prompts of no use to the others: what is measured shall not find them in the cache.
        warmup = replace(asked, kind="random", trace=None, num_sessions=settings.num_warmup, seed=asked.seed - 1)
        for number in range(num_rounds):
            sessions = make_sessions(replace(asked, seed=asked.seed + number))
            # Each goes first in every other round, so that a busy moment of the machine favours none.
            for url in urls if number % 2 == 0 else urls[::-1]:
                await drive(servers[url], make_sessions(warmup), settings)
                with Progress(console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
                    task = progress.add_task(f"{url}, round {number + 1}", total=sum(map(len, sessions)))
                    run = await drive(servers[url], sessions, settings, on_answer=partial(progress.advance, task))
                found[url].append(figures(run, limits))
    return found


def _write(path: Path, found: Figures, asked: dict[str, Any]) -> None:
    content = {"machine": report.machine_facts(), **asked, "servers": found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2, default=str) + "\n")
