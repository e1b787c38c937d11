"""`hybrid-engine eval`, `eval-tasks`, `eval-page` and `lm-eval`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from hybrid_engine.errors import ConfigError
from hybrid_engine.options import Dtype, Exact, Quantization

Resolve = Callable[[str], str | Path]
"""From a model as it is named on the command line to its path."""


def add_eval(app: typer.Typer, resolve: Resolve, default_model: str) -> None:
    """Add the commands to a command line."""

    @app.command(name="eval")
    def evaluate_model(
        model: Annotated[
            str, typer.Argument(help="A folder with safetensors, a .gguf file, 'demo', or 'tiny-hybrid'.")
        ] = default_model,
        tasks: Annotated[str, typer.Option(help="Names with commas between them; see eval-tasks.")] = "needle_map",
        lengths: Annotated[str, typer.Option(help="Tokens of prompt and answer, like 1024,2048 or 1k,2k.")] = "1k,2k",
        samples: Annotated[int, typer.Option(help="Samples of each task and length.")] = 25,
        seed: Annotated[int, typer.Option(help="The same seed makes the same samples.")] = 42,
        prompt_format: Annotated[str, typer.Option("--format", help="auto, completion, chat or chat-system.")] = "auto",
        answer_tokens: Annotated[int | None, typer.Option(help="The answers' budget instead of the tasks'.")] = None,
        essay: Annotated[Path | None, typer.Option(help="Prose for haystacks, as UTF-8 text.")] = None,
        squad: Annotated[Path | None, typer.Option(help="SQuAD's JSON, for qa_1.")] = None,
        hotpotqa: Annotated[Path | None, typer.Option(help="HotpotQA's JSON, for qa_2.")] = None,
        words: Annotated[Path | None, typer.Option(help="Words, one a line, for cwe at great lengths.")] = None,
        journal: Annotated[
            Path | None, typer.Option(help="Keeps finished samples; a run that was killed goes on with the same one.")
        ] = None,
        compare_without_reuse: Annotated[
            bool, typer.Option(help="Run everything a second time without the prefix cache, and show what it saves.")
        ] = False,
        name: Annotated[str | None, typer.Option(help="What the report is called; by default the model.")] = None,
        as_json: Annotated[Path | None, typer.Option("--json", help="Write the report to this file.")] = None,
        html: Annotated[Path | None, typer.Option(help="Write a page to this file.")] = None,
        dtype: Dtype = "auto",
        quantization: Quantization = None,
        exact: Exact = False,
        memory: Annotated[str | None, typer.Option(help="Cache memory, like 2GiB.")] = None,
        block_size: Annotated[int, typer.Option(help="Tokens in a cache block.")] = 16,
        max_num_seqs: Annotated[int, typer.Option(help="Samples that run at once.")] = 32,
        device: Annotated[str, typer.Option(help="cpu, cuda, or the like of cuda:1.")] = "cpu",
        threads: Annotated[int | None, typer.Option(help="Threads to compute with.")] = None,
    ) -> None:
        """Score a model's greedy answers to questions about long texts; docs/EVALS.md tells more."""
        from hybrid_engine.evals import Texts, evaluate, write_page
        from hybrid_engine.llm import LLM

        wanted = parse_lengths(lengths)
        llm = LLM(
            resolve(model),
            dtype=dtype,
            quantization=quantization,
            exact=exact,
            max_model_len=max(wanted),
            cache_memory_bytes=memory,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            device=device,
            num_threads=threads,
        )
        report = evaluate(
            llm,
            [each.strip() for each in tasks.split(",") if each.strip()],
            wanted,
            num_samples=samples,
            seed=seed,
            prompt_format=prompt_format,
            texts=Texts(essay, squad, hotpotqa, words),
            max_tokens=answer_tokens,
            journal=journal,
            name=name or Path(model).name,
            compare_without_reuse=compare_without_reuse,
        )
        console = Console()
        console.print(report.table())
        console.print(report.work_line(), highlight=False, soft_wrap=True)
        if as_json is not None:
            report.write_json(as_json)
        if html is not None:
            write_page(report, html)

    @app.command()
    def eval_tasks() -> None:
        """List the tasks of eval."""
        from hybrid_engine.evals import FAMILIES, TASKS
        from hybrid_engine.report import new_table

        table = new_table("Tasks", "name", "what", "answer tokens", left=("name", "what"))
        for task in TASKS.values():
            table.add_row(task.name, task.about, str(task.max_tokens))
        console = Console()
        console.print(table)
        for family, names in FAMILIES.items():
            console.print(f"{family}: {', '.join(names)}", highlight=False)

    @app.command()
    def eval_page(
        reports: Annotated[list[Path], typer.Argument(help="Reports that eval --json has written.")],
        html: Annotated[Path, typer.Option(help="Where the page goes.")],
    ) -> None:
        """Make one page of several reports, side by side."""
        from hybrid_engine.evals import read_report, write_page

        write_page([read_report(path) for path in reports], html)

    @app.command(
        name="lm-eval",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )
    def lm_eval(context: typer.Context) -> None:
        """Run lm-evaluation-harness, which then knows --model hybrid_engine; all arguments are its own."""
        from hybrid_engine.evals.harness import main

        main(context.args)


def parse_lengths(text: str) -> list[int]:
    """Read lengths like '1024,2048' or '1k,2k' (1k is 1,024). Raises ConfigError for anything else."""
    found = []
    for part in text.lower().split(","):
        number, factor = (part.strip().removesuffix("k"), 1024) if part.strip().endswith("k") else (part.strip(), 1)
        if not number.isdigit() or int(number) == 0:
            raise ConfigError(f"lengths is {text!r}, must be numbers of tokens with commas between, like 4096,8k")
        found.append(int(number) * factor)
    return found
