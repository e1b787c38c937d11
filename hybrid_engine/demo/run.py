"""The demo: three agents with one handbook, each request with and without the prefix cache, everything explained."""

from __future__ import annotations

import time
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

from hybrid_engine import report
from hybrid_engine.demo.both_ways import BothWays, Totals, reasons_legend, request_table, speed_table, verdict
from hybrid_engine.demo.conversations import HANDBOOK, Conversation, make_conversations
from hybrid_engine.demo.weights import TERMS, demo_checkpoint
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

ROUNDS = (((0, 0),), ((1, 0), (2, 0)), ((0, 1), (1, 1), (2, 1)), ((0, 2), (1, 2), (2, 2)), ((0, 0),))
"""(agent, turn) of the requests that are sent together. The first agent comes first, so that the others, who begin with
the same handbook, can find it; its first prompt comes again at the end."""


@dataclass(kw_only=True)
class Answered(BothWays):
    """One request of the demo."""

    conversation: Conversation
    turn: int
    is_repeat: bool

    @property
    def name(self) -> str:
        """The request's name in the table."""
        return f"{self.conversation.agent} {self.turn + 1}{' again' if self.is_repeat else ''}"


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
                self._take(
                    Answered(
                        conversation=conversation,
                        turn=turn,
                        is_repeat=repeats[index],
                        with_cache=cached[index],
                        without_cache=without[index],
                    )
                )

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
    reasons_legend(console, "hit", "last", "never seen", "evicted", "missing window", "alignment")
    console.print(speed_table(demo.on, demo.off))
    console.print(verdict(demo.answered, demo.on, demo.off), highlight=False)
    return demo
