"""The second demo: a small hybrid with recurrent layers recalls what one document says, for six people at once."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.markup import escape

from hybrid_engine import report
from hybrid_engine.demo.both_ways import BothWays, Totals, reasons_legend, request_table, speed_table, verdict
from hybrid_engine.demo.ledger import ledger, questions
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

NUM_VISITORS = 6


@dataclass
class Visitor:
    """Someone who asks about the document; what was said before is part of each prompt."""

    name: str
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": ledger()}])

    def ask(self, question: str) -> None:
        """Add a question."""
        self.messages.append({"role": "user", "content": question})

    def hear(self, answer: str) -> None:
        """Add an answer, exactly as it was generated."""
        self.messages.append({"role": "assistant", "content": answer})


@dataclass(kw_only=True)
class Recalled(BothWays):
    """One question of the demo."""

    visitor: str
    turn: int
    question: str
    expected: str

    @property
    def name(self) -> str:
        """The request's name in the table."""
        return f"{self.visitor} {self.turn + 1}"

    @property
    def is_right(self) -> bool:
        """Whether the answer is what the document says."""
        return self.with_cache.outputs[0].text.strip() == self.expected


class RecallDemo:
    """Lets the visitors ask, all at once, one question after the other."""

    def __init__(self, llm: LLM, console: Console) -> None:
        self._llm = llm
        self._console = console
        self._visitors = [Visitor(f"Visitor {letter}") for letter in "ABCDEFGH"[:NUM_VISITORS]]
        self.recalled: list[Recalled] = []
        self.on, self.off = Totals(), Totals()

    def run(self) -> None:
        """Run all rounds, one after the other."""
        # Code that runs for the first time is slower; neither mode shall pay for it.
        self._llm.generate("Warm up.", SamplingParams(max_tokens=2, temperature=0), progress=False)
        self._llm.reset_prefix_cache()
        asked = questions()
        for turn, first in enumerate(range(0, len(asked), NUM_VISITORS)):
            self._run_round(turn, asked[first : first + NUM_VISITORS])

    def _run_round(self, turn: int, asked: list[tuple[str, str]]) -> None:
        for visitor, (question, _) in zip(self._visitors, asked, strict=True):
            visitor.ask(question)
        prompts = [self._llm.apply_chat_template(visitor.messages) for visitor in self._visitors]
        # Each mode goes first in every other round, so that a busy moment of the machine favours neither.
        if turn % 2:
            without, cached = self._generate(prompts, reads_cache=False), self._generate(prompts, reads_cache=True)
        else:
            cached, without = self._generate(prompts, reads_cache=True), self._generate(prompts, reads_cache=False)
        for index, (visitor, (question, expected)) in enumerate(zip(self._visitors, asked, strict=True)):
            visitor.hear(cached[index].outputs[0].text)
            self._show(
                Recalled(
                    visitor=visitor.name,
                    turn=turn,
                    question=question,
                    expected=expected,
                    with_cache=cached[index],
                    without_cache=without[index],
                )
            )

    def _generate(self, prompts: list[dict[str, Any]], *, reads_cache: bool) -> list[RequestOutput]:
        sampling = SamplingParams(max_tokens=16, temperature=0, skip_reading_prefix_cache=not reads_cache)
        # A salt of its own: what one mode computes can't be found by the other.
        salted = [prompt | {"cache_salt": "on" if reads_cache else "off"} for prompt in prompts]
        start = time.perf_counter()
        outputs = self._llm.generate(salted, sampling, progress=False)
        (self.on if reads_cache else self.off).add(outputs, time.perf_counter() - start)
        return outputs

    def _show(self, recalled: Recalled) -> None:
        self.recalled.append(recalled)
        answer = escape(recalled.with_cache.outputs[0].text.strip())
        judged = "[bold green]right[/bold green]" if recalled.is_right else f"[red]wrong: {recalled.expected}[/red]"
        self._console.print(
            f"  {recalled.visitor}: {recalled.question} [bold]{answer}[/bold] {judged}", highlight=False, soft_wrap=True
        )


def run_recall_demo(console: Console | None = None) -> RecallDemo:
    """Load the model that comes along, run the demo and print it all."""
    console = console or Console()
    console.print("[bold]A small hybrid of our own: recurrent layers beside attention.[/bold]", highlight=False)
    llm = LLM(cache_memory_bytes="256MiB", max_num_seqs=NUM_VISITORS)
    console.print(report.summary(llm.engine_plan), highlight=False)
    console.print(report.layer_table(llm.model_info))
    console.print(report.group_table(llm.engine_plan))
    num_ledger = len(llm.get_tokenizer()(ledger())["input_ids"])
    console.print(
        f"\nIt was trained to recall. {NUM_VISITORS} visitors ask at once about one document of {num_ledger} tokens, "
        "which says things that nobody can guess. The first request computes it; the others wait for that and go on "
        "with a copy of the state that its recurrent layers have behind it.\n"
    )
    demo = RecallDemo(llm, console)
    demo.run()
    console.print()
    console.print(request_table(demo.recalled))
    reasons_legend(console, "hit", "last", "never seen", "evicted", "missing state", "alignment")
    console.print(speed_table(demo.on, demo.off))
    num_right = sum(recalled.is_right for recalled in demo.recalled)
    console.print(
        f"{verdict(demo.recalled, demo.on, demo.off)} Answers right: {num_right} of {len(demo.recalled)}.",
        highlight=False,
    )
    return demo
