"""Where a workload comes from: a trace's file, or the generator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from hybrid_engine.bench.generator.presets import preset
from hybrid_engine.bench.generator.sessions import generate
from hybrid_engine.bench.rendering import renderer_maker
from hybrid_engine.bench.token_free import with_chained_ids
from hybrid_engine.bench.traces import AUTO, WHOLE, Part, read_trace
from hybrid_engine.bench.workload import BlockPrompt, WorkItem


def read_workload(
    path: Path,
    *,
    format: str = AUTO,
    num_sessions: int | None = None,
    part: Part = WHOLE,
    tokenizer: Path | None = None,
    chat_template: Path | None = None,
    replaces_assistant: bool = False,
) -> list[WorkItem]:
    """Return a trace's calls, their texts tokenised. The arguments are those of `read_trace` and `renderer_maker`.

    Raises TraceError for what can't be read, ConfigError and CheckpointError for a tokenizer or template that can't.
    """
    renderer = renderer_maker(tokenizer, chat_template, replaces_assistant=replaces_assistant)()
    items = [renderer.item(call) for call in read_trace(path, format=format, num_sessions=num_sessions, part=part)]
    prompts = [item.prompt for item in items]
    if not all(isinstance(prompt, BlockPrompt) for prompt in prompts):
        return items
    chained = with_chained_ids([prompt for prompt in prompts if isinstance(prompt, BlockPrompt)])
    return [replace(item, prompt=prompt) for item, prompt in zip(items, chained, strict=True)]


def make_workload(name: str, *, seed: int = 0, num_sessions: int | None = None) -> list[WorkItem]:
    """Make up the calls of a preset of the generator, with so many sessions or as many as it has.

    Raises ConfigError for a name that isn't known.
    """
    changes = {} if num_sessions is None else {"num_sessions": num_sessions}
    return list(generate(preset(name, seed=seed, **changes)))
