"""The command line: `hybrid-engine generate`, `chat`, `plan`, `models`, `serve`, `eval` and `bench`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from hybrid_engine import __version__, tiny_hybrid
from hybrid_engine.bench.commands import app as bench
from hybrid_engine.bench.prefix_command import add_replay
from hybrid_engine.config import SpeculativeConfig, speculation
from hybrid_engine.errors import CheckpointError, ConfigError, HybridEngineError, RequestError, TraceError
from hybrid_engine.evals.command import add_eval
from hybrid_engine.options import (
    BlockSize,
    Device,
    DiskCache,
    DiskCacheSize,
    DraftModel,
    Dtype,
    Exact,
    HostCache,
    JsonSchema,
    MaxModelLen,
    MaxTokens,
    Memory,
    Model,
    NumSpeculative,
    PrefixCaching,
    Quantization,
    Regex,
    Seed,
    Speculative,
    Stop,
    Temperature,
    Threads,
    Tokenizer,
    TopK,
    TopP,
)
from hybrid_engine.sampling_params import SamplingParams, StructuredOutputsParams
from hybrid_engine.server.command import add_serve

if TYPE_CHECKING:
    from hybrid_engine.chat import Partner
    from hybrid_engine.llm import LLM
    from hybrid_engine.outputs import RequestOutput

CALLERS_MISTAKES = (ConfigError, RequestError, CheckpointError, TraceError)
DEMO, TINY_HYBRID = "demo", tiny_hybrid.NAME
FOR_A_SERVER = frozenset(
    ("model", "url", "api_key", "system", "max_tokens", "temperature", "top_p", "top_k", "seed", "json_schema", "regex")
)
"""Options of `chat` that a server is told."""

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(bench, name="bench")


@app.command()
def generate(
    model: Model = TINY_HYBRID,
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts; without any, stdin is one.")] = None,
    file: Annotated[Path | None, typer.Option(help="A UTF-8 file with one prompt a line.")] = None,
    n: Annotated[int, typer.Option(help="Answers to each prompt.")] = 1,
    max_tokens: MaxTokens = 64,
    temperature: Temperature = 0.0,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on past the end-of-text token.")] = False,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object for each prompt.")] = False,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    exact: Exact = False,
    max_model_len: MaxModelLen = None,
    memory: Memory = None,
    block_size: BlockSize = 16,
    prefix_caching: PrefixCaching = True,
    device: Device = "cpu",
    host_cache: HostCache = None,
    disk_cache: DiskCache = None,
    disk_cache_size: DiskCacheSize = None,
    threads: Threads = None,
    tokenizer: Tokenizer = None,
    speculative: Speculative = None,
    num_speculative: NumSpeculative = None,
    draft_model: DraftModel = None,
) -> None:
    """Complete prompts."""
    sampling = SamplingParams(
        n=n,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
        structured_outputs=_structured_outputs(json_schema, regex),
    )
    texts = _read_prompts(prompts, file)
    llm = _load(
        model,
        dtype=dtype,
        quantization=quantization,
        exact=exact,
        max_model_len=max_model_len,
        cache_memory_bytes=memory,
        block_size=block_size,
        enable_prefix_caching=prefix_caching,
        device=device,
        **_tiers(host_cache, disk_cache, disk_cache_size),
        num_threads=threads,
        tokenizer=tokenizer,
        speculative=_speculation(speculative, num_speculative, draft_model),
    )
    if len(texts) == 1 and n == 1 and not as_json:
        _stream_answer(llm, texts[0], sampling)
        return
    for output in llm.generate(texts, sampling):
        print(json.dumps(asdict(output), ensure_ascii=False)) if as_json else _print_output(output)


@app.command()
def chat(
    context: typer.Context,
    model: Model = TINY_HYBRID,
    url: Annotated[
        str | None, typer.Option(help="Talk with the server at this address; MODEL is what it calls its model.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="That the server asks for.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja chat template.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    max_tokens: MaxTokens = 512,
    temperature: Temperature = 0.7,
    top_p: TopP = 1.0,
    top_k: TopK = 0,
    seed: Seed = None,
    json_schema: JsonSchema = None,
    regex: Regex = None,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    exact: Exact = False,
    max_model_len: MaxModelLen = None,
    memory: Memory = None,
    device: Device = "cpu",
    host_cache: HostCache = None,
    disk_cache: DiskCache = None,
    disk_cache_size: DiskCacheSize = None,
    threads: Threads = None,
    tokenizer: Tokenizer = None,
    speculative: Speculative = None,
    num_speculative: NumSpeculative = None,
    draft_model: DraftModel = None,
) -> None:
    """Talk with a model: /reset begins anew, /exit or end of input ends, Ctrl-C cuts an answer short."""
    from hybrid_engine.chat import ChatSession, ModelPartner

    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        structured_outputs=_structured_outputs(json_schema, regex),
    )
    if url is not None:
        partner: Partner = _server_partner(context, url, api_key, sampling)
        ChatSession(partner, read=input, system=system).run()
        return
    llm = _load(
        model,
        chat_template=chat_template,
        dtype=dtype,
        quantization=quantization,
        exact=exact,
        max_model_len=max_model_len,
        cache_memory_bytes=memory,
        device=device,
        **_tiers(host_cache, disk_cache, disk_cache_size),
        num_threads=threads,
        tokenizer=tokenizer,
        speculative=_speculation(speculative, num_speculative, draft_model),
    )
    ChatSession(ModelPartner(llm, sampling), read=input, system=system).run()


@app.command()
def plan(
    model: Annotated[
        str, typer.Argument(help="A config.json, a folder, a .gguf file, 'demo' or 'tiny-hybrid'.")
    ] = TINY_HYBRID,
    dtype: Dtype = "auto",
    quantization: Quantization = None,
    max_model_len: MaxModelLen = None,
    memory: Memory = None,
    block_size: BlockSize = 16,
    device: Device = "cpu",
    concurrency: Annotated[
        int | None, typer.Option(help="Say whether so many requests fit at once, and what memory would do.", min=1)
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens of each of them; by default as far as it reaches.", min=1)
    ] = None,
    checkpoints: Annotated[int, typer.Option(help="Recurrent states kept of a request beside its own.", min=0)] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw how many fit over their length, to a .png or .svg.")] = None,
) -> None:
    """Show a model's layers and what its cache memory holds; no weights are read."""
    from hybrid_engine import report
    from hybrid_engine.bench import plan_plot
    from hybrid_engine.llm import LLM

    found = LLM.plan(
        _resolve(model),
        dtype=dtype,
        quantization=quantization,
        max_model_len=max_model_len,
        cache_memory_bytes=memory,
        block_size=block_size,
        device=device,
    )
    console = Console()
    console.print(report.summary(found), highlight=False)
    console.print(report.layer_table(found.info))
    console.print(report.group_table(found))
    console.print(report.capacity_line(found), highlight=False)
    console.print(report.extents_line(found), highlight=False)
    longest = context or found.max_model_len
    contexts = [length for length in plan_plot.CONTEXTS if length <= max(found.max_model_len, plan_plot.CONTEXTS[0])]
    names = report.group_names(found)
    capacity = plan_plot.capacity_of(found.memory, names, contexts=contexts, num_states=1 + checkpoints)
    console.print(plan_plot.table(capacity, title="Requests that fit at once, sharing nothing"))
    if concurrency is not None:
        wanted = report.concurrency_line(found, concurrency, longest, num_states=1 + checkpoints)
        console.print(wanted, highlight=False)
    if plot is not None:
        plan_plot.draw(capacity, plot, title=f"{found.info.architecture}, {report.format_bytes(capacity.memory_bytes)}")
        console.print(f"Drawn to {plot}", highlight=False)


@app.command()
def models(
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/MODELS.md.")] = False,
) -> None:
    """Show the families of models that are run here, and what they keep of a token."""
    from hybrid_engine import families, report

    if markdown:
        print(families.markdown(), end="")
        return
    columns = families.COLUMNS
    table = report.new_table("Families", *columns, left=columns[:4])
    for row in families.rows():
        table.add_row(*row)
    Console().print(table)


# Their options are many, and stand elsewhere.
add_serve(app, lambda model: _resolve(model))
add_eval(app, lambda model: _resolve(model), TINY_HYBRID)
add_replay(app)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        print(f"hybrid-engine {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    """Inference for models that mix full attention, sliding windows and recurrent state."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exits with 2 for the caller's mistakes and 1 for ours, with one line on stderr."""
    # Read once, when torch loads: threads that spin while they wait slow each other down on a busy machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        app(arguments)
    except HybridEngineError as error:
        text = " ".join(str(error).split())
        Console(stderr=True).print(f"[red]error: {escape(text)}[/red]", soft_wrap=True, highlight=False)
        sys.exit(2 if isinstance(error, CALLERS_MISTAKES) else 1)
    sys.exit(0)


def _server_partner(context: typer.Context, url: str, api_key: str | None, sampling: SamplingParams) -> Partner:
    """Return the server to talk with. Raises ConfigError when options of a model in this process are given too."""
    from hybrid_engine.chat import ServerPartner, connect, server_options

    given = {name for name in context.params if str(context.get_parameter_source(name)).endswith("COMMANDLINE")}
    wrong = sorted(given - FOR_A_SERVER)
    if wrong:
        raise ConfigError(f"--{wrong[0].replace('_', '-')} is for a model that is loaded here: leave it out with --url")
    model = context.params["model"] if "model" in given else None
    return ServerPartner(connect(url, api_key), model=model, options=server_options(sampling))


def _resolve(model: str) -> str | Path:
    if model != DEMO:
        return model
    from hybrid_engine.demo import TERMS, demo_checkpoint

    print(TERMS, file=sys.stderr)
    return demo_checkpoint()


def _load(model: str, **settings: Any) -> LLM:
    from hybrid_engine.llm import LLM

    return LLM(_resolve(model), **settings)


def _tiers(host_cache: str | None, disk_cache: Path | None, disk_cache_size: str | None) -> dict[str, Any]:
    """Return the settings that were given: those left out keep the defaults of `LLM`."""
    given = {"host_cache_bytes": host_cache, "disk_cache": disk_cache, "disk_cache_bytes": disk_cache_size}
    return {name: value for name, value in given.items() if value is not None}


def _structured_outputs(json_schema: Path | None, regex: str | None) -> StructuredOutputsParams | None:
    if json_schema is None:
        return None if regex is None else StructuredOutputsParams(regex=regex)
    if regex is not None:
        raise RequestError("--json-schema and --regex are both given: an answer matches one of them")
    try:
        return StructuredOutputsParams(json=json_schema.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the JSON schema can't be read: {error}") from error


def _speculation(method: str | None, num_tokens: int | None, draft_model: str | None) -> SpeculativeConfig | None:
    return speculation(method, num_tokens, None if draft_model is None else _resolve(draft_model))


def _read_prompts(prompts: list[str] | None, file: Path | None) -> list[str]:
    texts = list(prompts or [])
    try:
        if file is not None:
            texts += [line for line in file.read_text(encoding="utf-8").split("\n") if line]
        elif not texts and not sys.stdin.isatty():
            # The line end that `echo` and editors put last is not meant; any other is.
            texts = [text for text in [sys.stdin.read().removesuffix("\n")] if text]
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"the prompts can't be read from {file or 'stdin'} as UTF-8 text: {error}") from error
    if not texts:
        raise RequestError(
            "there is no prompt: give some as arguments behind the model (hybrid-engine generate tiny-hybrid PROMPT), "
            "in a --file, or one on stdin"
        )
    return texts


def _stream_answer(llm: LLM, prompt: str, sampling: SamplingParams) -> None:
    delta: RequestOutput | None = None
    num_tokens = 0
    for delta in llm.stream(prompt, sampling):
        num_tokens += len(delta.outputs[0].token_ids)
        print(delta.outputs[0].text, end="", flush=True)
    print()
    if delta is not None:
        _print_facts(delta, num_tokens)


def _print_output(output: RequestOutput) -> None:
    Console().rule(escape(repr(output.prompt)[1:-1][-60:]), align="left")
    for completion in output.outputs:
        print(completion.text)
    _print_facts(output, sum(len(completion.token_ids) for completion in output.outputs))


def _print_facts(output: RequestOutput, num_tokens: int) -> None:
    metrics = output.metrics
    facts = f"{num_tokens} tokens in {metrics.total_seconds or 0.0:.1f} s; prompt: {output.cache} tokens"
    if metrics.num_draft_tokens:
        facts += f"; {metrics.num_accepted_tokens} of {metrics.num_draft_tokens} guesses right"
    Console(stderr=True).print(facts, style="dim", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
