"""How replays are shown: a table with one column for each choice of groups, and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from hybrid_engine.bench.replay import ReplayResult
from hybrid_engine.bench.report import machine_facts


def table(results: Sequence[ReplayResult], *, title: str) -> Table:
    """Return the results side by side."""
    shown = Table(title=title, title_justify="left")
    shown.add_column("what")
    for result in results:
        shown.add_column(result.settings.groups, justify="right")
    columns = [_cells(result) for result in results]
    for name in columns[0]:
        shown.add_row(name, *(column[name] for column in columns))
    return shown


def _cells(result: ReplayResult) -> dict[str, str]:
    memory = f"{result.memory_bytes / 2**30:,.2f} GiB" + ("" if result.settings.memory_bytes else ", ample")
    missed = {f"  missed: {name.replace('_', ' ')}": f"{count:,}" for name, count in result.missed_tokens.items()}
    return {
        "memory": memory,
        "requests": f"{result.num_requests:,}",
        "  refused, too long": f"{result.num_refused:,}",
        "prompt tokens": f"{result.num_prompt_tokens:,}",
        "  hit": f"{result.num_hit_tokens:,}",
        "  last tokens": f"{result.num_last_tokens:,}",
        **missed,
        "share of the prompts hit": f"{result.num_hit_tokens / max(1, result.num_prompt_tokens):.2%}",
        "token-exact bound": f"{result.num_bound_tokens:,}",
        "share of the bound hit": f"{result.hit_share_of_bound:.2%}",
        "answer tokens": f"{result.num_answer_tokens:,}",
        "tokens computed": f"{result.num_computed_tokens:,}",
        "  again, after preemptions": f"{result.num_recomputed_tokens:,}",
        "preemptions": f"{result.num_preemptions:,}",
        "steps": f"{result.num_steps:,}",
        "seconds of bookkeeping": f"{result.seconds:,.2f}",
        "  requests a second": f"{result.requests_per_second:,.0f}",
        "  prompt tokens a second": f"{result.prompt_tokens_per_second:,.0f}",
        "processor seconds of it": f"{result.processor_seconds:,.2f}",
        "  prompt tokens a processor second": f"{result.prompt_tokens_per_processor_second:,.0f}",
    }


def write_json(results: Sequence[ReplayResult], path: Path, *, trace: str) -> None:
    """Write results, and the machine they were measured on, to a file. trace: what was replayed, in words."""
    content = {"trace": trace, "machine": machine_facts(), "replays": [_values(result) for result in results]}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n")


def _values(result: ReplayResult) -> dict[str, Any]:
    return {
        **asdict(result),
        "hit_share_of_bound": result.hit_share_of_bound,
        "requests_per_second": result.requests_per_second,
        "prompt_tokens_per_second": result.prompt_tokens_per_second,
        "prompt_tokens_per_processor_second": result.prompt_tokens_per_processor_second,
    }
