"""What the demos have in common: each request is run with the prefix cache on and off, and both are shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from hybrid_engine import report
from hybrid_engine.outputs import RequestOutput

REASONS = {
    "hit": "found in the cache, not computed",
    "last": "the last token: always computed, because the answer's first token comes from it",
    "never seen": "nobody had sent this before",
    "evicted": "was known, but its memory was needed for something else",
    "missing state": "the full-attention layers had it, but no recurrent state to go on from was there",
    "missing window": "the full-attention layers had it, the sliding-window layers no longer did",
    "alignment": "known, but between two positions at which a request can go on",
    "disabled": "the cache was not read",
}


@dataclass
class Totals:
    """What the requests of one mode came to."""

    prompt_tokens: int = 0
    computed_tokens: int = 0
    answer_tokens: int = 0
    seconds: float = 0.0

    def add(self, outputs: Iterable[RequestOutput], seconds: float) -> None:
        """Count requests that ran together."""
        self.seconds += seconds
        for output in outputs:
            assert output.cache is not None, f"request {output.request_id} ended without having run"
            self.prompt_tokens += len(output.prompt_token_ids)
            self.computed_tokens += output.cache.num_computed
            self.answer_tokens += len(output.outputs[0].token_ids)


@dataclass(kw_only=True)
class BothWays:
    """One request, run with the prefix cache and without it."""

    with_cache: RequestOutput
    without_cache: RequestOutput

    @property
    def name(self) -> str:
        """The request's name in the table."""
        raise NotImplementedError

    @property
    def is_equal(self) -> bool:
        """Whether both ways gave the same answer."""
        return self.with_cache.outputs[0].token_ids == self.without_cache.outputs[0].token_ids


def request_table(answered: Iterable[BothWays]) -> Table:
    """Show for each request where its prompt's tokens came from, and the wait for its first token both ways."""
    counts = [(request, token_counts(request.with_cache)) for request in answered]
    seen = [name for name in REASONS if any(count[name] for _, count in counts)]
    table = report.new_table(
        "Where each prompt's tokens came from, and the seconds to the answer's first token",
        *("request", "prompt", *seen, "computed", "cache on", "off"),
        left=("request",),
    )
    table.columns[0].no_wrap = True
    for request, count in counts:
        prompt = sum(count.values())
        table.add_row(
            request.name,
            *(f"{number:,}" for number in (prompt, *(count[name] for name in seen), prompt - count["hit"])),
            *(f"{output.metrics.ttft_seconds:.2f}" for output in (request.with_cache, request.without_cache)),
        )
    return table


def token_counts(output: RequestOutput) -> dict[str, int]:
    """Return the tokens of a prompt by where they came from; the numbers add up to the prompt."""
    cache = output.cache
    assert cache is not None, f"request {output.request_id} ended without having run"
    counts = {"hit": cache.hit, "last": cache.LAST}
    counts |= {name.replace("_", " "): count for name, count in cache.reasons().items()}
    assert sum(counts.values()) == len(output.prompt_token_ids), f"{cache} doesn't add up"
    return counts


def speed_table(on: Totals, off: Totals) -> Table:
    """Show what the cache saved in this run."""
    columns = ("prompt tokens", "computed", "answer tokens", "seconds", "tokens/s", "answer tokens/s")
    title = "The same requests with the prefix cache on and off, in turns"
    table = report.new_table(title, "prefix cache", *columns, left=("prefix cache",))
    for name, totals in (("on", on), ("off", off)):
        table.add_row(
            name,
            *(f"{count:,}" for count in (totals.prompt_tokens, totals.computed_tokens, totals.answer_tokens)),
            f"{totals.seconds:.2f}",
            f"{(totals.prompt_tokens + totals.answer_tokens) / totals.seconds:,.0f}",
            f"{totals.answer_tokens / totals.seconds:,.1f}",
        )
    return table


def reasons_legend(console: Console, *names: str) -> None:
    """Say what the table's columns mean."""
    for name in names:
        console.print(f"  [bold]{name}[/bold]: {REASONS[name]}", highlight=False)
    console.print("A reason that took no token has no column.\n")


def verdict(answered: Sequence[BothWays], on: Totals, off: Totals) -> str:
    """What the cache saved, and that it changed no answer."""
    share = 1 - on.computed_tokens / on.prompt_tokens
    num_equal = sum(request.is_equal for request in answered)
    return (
        f"The cache saved {share:.0%} of the prompts' computation and made the run "
        f"{off.seconds / on.seconds:.1f} times as fast. "
        f"Answers equal with and without it: {num_equal} of {len(answered)}."
    )
