"""The demo: three agents with one handbook, each request with and without the prefix cache, everything explained."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hybrid_engine import report
from hybrid_engine.demo.conversations import HANDBOOK, Conversation, make_conversations
from hybrid_engine.demo.weights import TERMS, demo_checkpoint
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

ROUNDS = (((0, 0),), ((1, 0), (2, 0)), ((0, 1), (1, 1), (2, 1)), ((0, 2), (1, 2), (2, 2)), ((0, 0),))
"""(agent, turn) of the requests that are sent together. The first agent comes first, so that the others, who begin with
the same handbook, can find it; its first prompt comes again at the end."""

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


@dataclass
class Answered:
    """One request of the demo, run both ways."""

    conversation: Conversation
    turn: int
    is_repeat: bool
    with_cache: RequestOutput
    without_cache: RequestOutput

    @property
    def name(self) -> str:
        """The request's name in the table."""
        return f"{self.conversation.agent} {self.turn + 1}{' again' if self.is_repeat else ''}"

    @property
    def is_equal(self) -> bool:
        """Whether both ways gave the same answer."""
        return self.with_cache.outputs[0].token_ids == self.without_cache.outputs[0].token_ids


class Demo:
    """Runs the rounds on a model and tells what happens."""

    def __init__(self, llm: LLM, console: Console) -> None:
        self._llm = llm
        self._console = console
        self._conversations = make_conversations()
        self.answered: list[Answered] = []
        self.on, self.off = Totals(), Totals()

    def run(self) -> None:
        """Run all rounds, one after the other."""
        # Code that runs for the first time is slower; neither mode shall pay for it.
        self._llm.generate("Warm up.", SamplingParams(max_tokens=2, temperature=0), progress=False)
        self._llm.reset_prefix_cache()
        for number, entries in enumerate(ROUNDS):
            conversations = [(self._conversations[agent], turn) for agent, turn in entries]
            repeats = [turn < len(conversation.prompts) for conversation, turn in conversations]
            prompts = [conversation.prompt(turn) for conversation, turn in conversations]
            # Each mode goes first in every other round, so that a busy moment of the machine favours neither.
            if number % 2:
                without, cached = self._generate(prompts, reads_cache=False), self._generate(prompts, reads_cache=True)
            else:
                cached, without = self._generate(prompts, reads_cache=True), self._generate(prompts, reads_cache=False)
            for index, (conversation, turn) in enumerate(conversations):
                self._take(Answered(conversation, turn, repeats[index], cached[index], without[index]))

    def _generate(self, prompts: list[str], *, reads_cache: bool) -> list[RequestOutput]:
        sampling = SamplingParams(max_tokens=40, temperature=0, stop=("\n",), skip_reading_prefix_cache=not reads_cache)
        # A salt of its own: what one mode computes can't be found by the other.
        salted = [{"prompt": prompt, "cache_salt": "on" if reads_cache else "off"} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(salted, sampling, progress=False)
        (self.on if reads_cache else self.off).add(outputs, time.perf_counter() - start)
        return outputs

    def _take(self, answered: Answered) -> None:
        self.answered.append(answered)
        conversation, output = answered.conversation, answered.with_cache
        question, answer = conversation.questions[answered.turn], output.outputs[0].text
        if not answered.is_repeat:
            conversation.answer(answered.turn, answer)
        self._console.print(
            f"  {conversation.agent} is asked{' again' if answered.is_repeat else ''}: {escape(question)}\n"
            f"    [bold green]{escape(answer.strip())}[/bold green]\n"
            f"    [dim]{output.cache} tokens[/dim]",
            highlight=False,
        )


def request_table(answered: Iterable[Answered]) -> Table:
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


def run_demo(console: Console | None = None) -> Demo:
    """Load the real model, run the demo and print it all."""
    console = console or Console()
    console.print(f"[bold]Gemma 3 270M on this CPU.[/bold] {TERMS}\n", highlight=False)
    start = time.perf_counter()
    llm = LLM(demo_checkpoint(), cache_memory_bytes="512MiB", max_num_seqs=8)
    console.print(f"{report.summary(llm.engine_plan)} (loaded in {time.perf_counter() - start:.1f} s)", highlight=False)
    console.print(report.layer_table(llm.model_info))
    console.print(
        "Most layers see only the last tokens and keep no others; a few see everything. Layers that keep the same form "
        "a group with memory of its own, and a prompt can go on where every group still has what it needs.\n"
    )
    console.print(report.group_table(llm.engine_plan))
    console.print(report.capacity_line(llm.engine_plan), highlight=False)
    num_handbook = len(llm.get_tokenizer()(HANDBOOK)["input_ids"])
    console.print(
        f"\nThree agents answer questions about one handbook of {num_handbook} tokens. Every prompt begins with it, "
        f"and every turn repeats what was said before. What was computed once is found again in the cache:\n"
    )
    demo = Demo(llm, console)
    demo.run()
    console.print()
    console.print(request_table(demo.answered))
    for name in ("hit", "last", "never seen", "evicted", "missing window", "alignment"):
        console.print(f"  [bold]{name}[/bold]: {REASONS[name]}", highlight=False)
    console.print("A reason that took no token has no column.\n")
    console.print(speed_table(demo.on, demo.off))
    console.print(_verdict(demo), highlight=False)
    return demo


def _verdict(demo: Demo) -> str:
    share = 1 - demo.on.computed_tokens / demo.on.prompt_tokens
    num_equal = sum(request.is_equal for request in demo.answered)
    return (
        f"The cache saved {share:.0%} of the prompts' computation and made the run "
        f"{demo.off.seconds / demo.on.seconds:.1f} times as fast. "
        f"Answers equal with and without it: {num_equal} of {len(demo.answered)}."
    )
