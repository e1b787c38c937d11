"""Options that several commands of the command line have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Model = Annotated[
    str,
    typer.Argument(
        help="A folder with safetensors, a .gguf file, 'demo' (the Gemma 3 270M that the demo extra brings), or "
        "'tiny-hybrid' (the small Jamba that comes along)."
    ),
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, or auto: the checkpoint's own.")]
Quantization = Annotated[
    str | None, typer.Option(help="Keep weights in 8 bits: int8; w8a8: and round what they multiply to 8 bits, too.")
]
Exact = Annotated[bool, typer.Option(help="The same bits in whatever steps, and beside whatever else; docs/EXACT.md.")]
MaxModelLen = Annotated[int | None, typer.Option(help="Most tokens of a prompt and its answer.")]
Memory = Annotated[str | None, typer.Option(help="Cache memory, like 2GiB; by default a quarter of what is free.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a cache block.")]
PrefixCaching = Annotated[bool, typer.Option(help="Find prompts that begin like earlier ones in the cache.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, or the like of cuda:1.")]
HostCache = Annotated[str | None, typer.Option(help="Host memory, like 4GiB, for prefixes that the caches give up.")]
DiskCache = Annotated[Path | None, typer.Option(help="A folder in which cached prefixes outlive this process.")]
DiskCacheSize = Annotated[str | None, typer.Option(help="Most bytes of one model in it, like 100GiB; 16GiB.")]
Threads = Annotated[int | None, typer.Option(help="Threads to compute with.")]
Tokenizer = Annotated[Path | None, typer.Option(help="Where the tokenizer lies, if not with the model.")]
Speculative = Annotated[str | None, typer.Option(help="Guess tokens ahead by: ngram, or draft_model.")]
NumSpeculative = Annotated[int | None, typer.Option("--num-speculative-tokens", help="Most tokens guessed ahead (5).")]
DraftModel = Annotated[str | None, typer.Option(help="A smaller checkpoint, same vocabulary, that guesses ahead.")]
MaxTokens = Annotated[int, typer.Option(help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option(help="0 always takes the likeliest token.")]
TopP = Annotated[float, typer.Option(help="Keep the likeliest tokens that add up to this probability.")]
TopK = Annotated[int, typer.Option(help="Keep the k likeliest tokens; 0 keeps all.")]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]
JsonSchema = Annotated[Path | None, typer.Option(help="Answer with JSON that matches the schema in this file.")]
Regex = Annotated[str | None, typer.Option(help="Answer with a text that matches this, whole.")]
