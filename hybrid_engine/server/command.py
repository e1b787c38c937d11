"""`hybrid-engine serve`. Loads nothing heavy until it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from hybrid_engine import tiny_hybrid
from hybrid_engine.config import speculation
from hybrid_engine.errors import ConfigError
from hybrid_engine.options import Dtype, Exact, Quantization
from hybrid_engine.server.settings import AUTO, ServerSettings, read_api_keys

if TYPE_CHECKING:
    from hybrid_engine.startup import EnginePlan

Resolve = Callable[[str], str | Path]
"""Makes a path of what the command line calls a model."""


def add_serve(app: typer.Typer, resolve: Resolve) -> None:
    """Add the command to a command line."""

    @app.command()
    def serve(
        model: Annotated[
            str,
            typer.Argument(help="A folder with safetensors, a .gguf file, 'tiny-hybrid' (comes with it), or 'demo'."),
        ] = tiny_hybrid.NAME,
        config: Annotated[
            Path | None,
            typer.Option(
                help="A YAML file with these options, names as here without the dashes in front; what the command "
                "line has counts more.",
                is_eager=True,
                callback=_read_config,
            ),
        ] = None,
        host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0: on all interfaces.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
        served_model_name: Annotated[
            list[str] | None, typer.Option(help="What clients call the model; may be given several times.")
        ] = None,
        api_key: Annotated[
            list[str] | None,
            typer.Option(
                help="A key that clients must send; may be given several times.", envvar="HYBRID_ENGINE_API_KEY"
            ),
        ] = None,
        api_key_file: Annotated[Path | None, typer.Option(help="A file with such keys, one a line.")] = None,
        share_cache: Annotated[bool, typer.Option(help="Let clients with different keys share prefixes.")] = False,
        dtype: Dtype = "auto",
        quantization: Quantization = None,
        exact: Exact = False,
        max_model_len: Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer.")] = None,
        max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once.")] = 64,
        max_num_batched_tokens: Annotated[int, typer.Option(help="Tokens computed in one step.")] = 2048,
        long_prefill_token_threshold: Annotated[
            int, typer.Option(help="Tokens that one request may compute in a step; 0: as many as there is room for.")
        ] = 0,
        async_depth: Annotated[
            int | None, typer.Option(help="Steps launched before the last one's tokens are read, 0 to 2; a CPU: 0.")
        ] = None,
        speculative: Annotated[str | None, typer.Option(help="Guess tokens ahead by: ngram, or draft_model.")] = None,
        num_speculative: Annotated[
            int | None, typer.Option("--num-speculative-tokens", help="Most tokens guessed ahead (5).")
        ] = None,
        draft_model: Annotated[
            str | None, typer.Option(help="A smaller checkpoint, same vocabulary, that guesses ahead.")
        ] = None,
        scheduling_policy: Annotated[
            str, typer.Option(help="fcfs: in the order of arrival. priority: a lower 'priority' in a request first.")
        ] = "fcfs",
        memory: Annotated[
            str | None,
            typer.Option(
                "--memory",
                "--kv-cache-memory-bytes",
                help="Cache memory, like 2GiB; by default a quarter of what is free.",
            ),
        ] = None,
        host_cache: Annotated[
            str | None, typer.Option(help="Host memory, like 4GiB, for prefixes that the caches give up.")
        ] = None,
        disk_cache: Annotated[
            Path | None, typer.Option(help="A folder in which cached prefixes outlive this process.")
        ] = None,
        disk_cache_size: Annotated[
            str | None, typer.Option(help="Most bytes of one model in it, like 100GiB; 16GiB.")
        ] = None,
        block_size: Annotated[int, typer.Option(help="Tokens in a cache block.")] = 16,
        device: Annotated[str, typer.Option(help="cpu, cuda, or the like of cuda:1.")] = "cpu",
        enable_prefix_caching: Annotated[
            bool,
            typer.Option(
                "--enable-prefix-caching/--no-enable-prefix-caching",
                help="Find prompts that begin like earlier ones in the cache.",
            ),
        ] = True,
        threads: Annotated[int | None, typer.Option(help="Threads to compute with.")] = None,
        tokenizer: Annotated[Path | None, typer.Option(help="Where the tokenizer lies, if not with the model.")] = None,
        seed: Annotated[int, typer.Option(help="What requests without a seed draw theirs from.")] = 0,
        chat_template: Annotated[Path | None, typer.Option(help="A file with a Jinja chat template.")] = None,
        tool_parser: Annotated[
            str,
            typer.Option(
                "--tool-parser",
                "--tool-call-parser",
                help="How the model writes tool calls: auto (by its template), none, jamba, granite, hermes, qwen_xml, "
                "gemma, llama_json, harmony.",
            ),
        ] = AUTO,
        reasoning_parser: Annotated[
            str, typer.Option(help="How it marks reasoning: auto, none, think, granite, harmony.")
        ] = AUTO,
        max_queue: Annotated[int, typer.Option(help="Answers that may wait; then clients get status 429.")] = 256,
        max_concurrency: Annotated[
            int | None, typer.Option(help="Answers in flight, running or waiting; by default max-num-seqs + max-queue.")
        ] = None,
        request_timeout: Annotated[float | None, typer.Option(help="Seconds that a request may take.")] = None,
        drain_timeout: Annotated[
            float, typer.Option(help="Seconds that requests may still take after SIGTERM.")
        ] = 60.0,
        stream_interval: Annotated[
            float,
            typer.Option(
                "--stream-interval-ms",
                help="Tokens of steps faster than this are sent together; 0: each step's at once.",
            ),
        ] = 20.0,
        max_body_bytes: Annotated[int, typer.Option(help="Largest request.")] = 16 * 2**20,
        cors_origin: Annotated[
            list[str] | None, typer.Option(help="An origin from which browsers may ask; '*': any.")
        ] = None,
        access_log: Annotated[bool, typer.Option(help="A line for each request, without its text.")] = True,
        cache_log: Annotated[
            Path | None, typer.Option(help="Append to this file what `hybrid-engine replay` needs; it holds no text.")
        ] = None,
        admin: Annotated[bool, typer.Option(help="Offer the routes below /cache.")] = True,
        tls_certificate: Annotated[Path | None, typer.Option("--tls-certificate", "--ssl-certfile")] = None,
        tls_key: Annotated[Path | None, typer.Option("--tls-key", "--ssl-keyfile")] = None,
    ) -> None:
        """Serve a model over HTTP, with OpenAI's API."""
        from hybrid_engine.chat_template import read_template

        settings = ServerSettings(
            tuple(served_model_name or [Path(model).stem or model]),
            api_keys=read_api_keys(tuple(api_key or ()), api_key_file),
            share_cache=share_cache,
            max_queue=max_queue,
            max_concurrency=max_concurrency,
            request_timeout_seconds=request_timeout,
            max_body_bytes=max_body_bytes,
            drain_seconds=drain_timeout,
            stream_interval_seconds=stream_interval / 1000,
            cors_origins=tuple(cors_origin or ()),
            chat_template=None if chat_template is None else read_template(chat_template),
            tool_parser=tool_parser,
            reasoning_parser=reasoning_parser,
            is_admin_open=admin,
            has_access_log=access_log,
            cache_log=cache_log,
        )
        try:
            from hybrid_engine.server.run import Listener, run_server
        except ImportError as error:
            raise ConfigError(
                f"serve needs packages that aren't installed ({error}): pip install 'hybrid-engine[server]'"
            ) from error
        from hybrid_engine.async_engine import AsyncEngine

        engine = AsyncEngine.load(
            resolve(model),
            dtype=dtype,
            quantization=quantization,
            exact=exact,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            scheduling_policy=scheduling_policy,
            cache_memory_bytes=memory,
            **_given(host_cache_bytes=host_cache, disk_cache=disk_cache, disk_cache_bytes=disk_cache_size),
            long_prefill_token_threshold=long_prefill_token_threshold,
            async_depth=async_depth,
            speculative=speculation(speculative, num_speculative, draft_model and resolve(draft_model)),
            device=device,
            block_size=block_size,
            enable_prefix_caching=enable_prefix_caching,
            num_threads=threads,
            tokenizer=tokenizer,
            seed=seed,
        )
        assert engine.plan is not None
        _print_summary(engine.plan, settings, f"{host}:{port}")
        run_server(engine, settings, Listener(host, port, tls_certificate, tls_key))


def _print_summary(plan: EnginePlan, settings: ServerSettings, address: str) -> None:
    from hybrid_engine import report

    console = Console(stderr=True)
    console.print(report.summary(plan), highlight=False)
    console.print(report.layer_table(plan.info))
    console.print(report.group_table(plan))
    console.print(report.capacity_line(plan), highlight=False)
    console.print(f"Serving {settings.model_name} at {address}", highlight=False)
    if not settings.api_keys:
        console.print("There is no API key: whoever reaches this address may ask.", style="yellow")


def _given(**settings: Any) -> Any:
    """Return the settings that were given: those left out keep the engine's defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Make what a YAML file has the defaults of the other options. Raises ConfigError for what is none of them."""
    if path is None:
        return None
    import yaml

    try:
        found: Any = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"the configuration can't be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, must be options and their values")
    parameters = [parameter for parameter in context.command.params if parameter.name not in ("config", "model")]
    known = {_key(option): parameter.name for parameter in parameters for option in (parameter.name, *parameter.opts)}
    unknown = sorted(str(name) for name in found if _key(name) not in known)
    if unknown:
        raise ConfigError(f"{path} has {unknown[0]!r}, which is no option of serve; see hybrid-engine serve --help")
    options = {known[_key(name)]: value for name, value in found.items()}
    context.default_map = {**(context.default_map or {}), **options}
    return path


def _key(name: object) -> str:
    """Return by what an option is found, whichever way it is written."""
    return str(name).lstrip("-").replace("-", "_")
