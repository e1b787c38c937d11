"""`evaluate`: samples in, scores out; each document is computed once, and a killed run goes on."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from hybrid_engine.errors import ConfigError, HybridEngineError
from hybrid_engine.evals.grouping import junctions, num_unique_tokens, shared_order
from hybrid_engine.evals.journal import Journal, Record
from hybrid_engine.evals.metrics import clean
from hybrid_engine.evals.prompts import Prompts
from hybrid_engine.evals.report import Report, make_report
from hybrid_engine.evals.samples import Builder, Sample, sample_key
from hybrid_engine.evals.tasks import find_tasks
from hybrid_engine.evals.tasks.base import GroupId, Task
from hybrid_engine.evals.texts import Texts
from hybrid_engine.groups.spec import ENDLESS
from hybrid_engine.llm import LLM
from hybrid_engine.outputs import RequestOutput
from hybrid_engine.sampling_params import SamplingParams

PIECE_TOKENS = 64
"""Log-probabilities are kept as means over so many tokens."""


class TruncatedError(HybridEngineError):
    """A sample was not run as it was made: its score would mean nothing."""


def evaluate(
    llm: LLM,
    tasks: Sequence[str | Task],
    lengths: Sequence[int],
    *,
    num_samples: int = 25,
    seed: int = 42,
    prompt_format: str = "auto",
    texts: Texts | None = None,
    max_tokens: int | None = None,
    journal: str | Path | None = None,
    name: str = "",
    reuse: bool = True,
    compare_without_reuse: bool = False,
    progress: bool | None = None,
) -> Report:
    """Ask a model the questions of some tasks at some lengths, and score its greedy answers.

    tasks: names, names of families ('ruler', 'facts', 'hops', 'all'), or tasks of your own. lengths: tokens of prompt
    and answer together, as the model's tokenizer counts them, template included. num_samples: of each task and length.
    prompt_format: 'completion', 'chat', 'chat-system' or 'auto', see `prompts.FORMATS`. texts: what documents are made
    of. max_tokens: the answers' budget instead of each task's own. journal: a file that keeps finished samples; a run
    with the same one goes on where it ended. name: what the report is called. reuse: read the prefix cache.
    compare_without_reuse: run everything a second time without, to show what that saves. progress: show a bar on
    stderr; None: when that is a terminal.

    Raises ConfigError before anything runs for what can't be run, TruncatedError when a sample was cut.
    """
    texts = texts or Texts()
    texts.sources()  # raises for a file that doesn't exist
    run = _Run(
        llm,
        find_tasks(tasks),
        _check_lengths(lengths, llm.max_model_len),
        num_samples=_check_at_least_one("num_samples", num_samples),
        builder=Builder(
            Prompts(llm, prompt_format),
            texts,
            seed=seed,
            max_tokens=None if max_tokens is None else _check_at_least_one("max_tokens", max_tokens),
        ),
        reuse=reuse,
        compares=compare_without_reuse,
    )
    run.check()
    settings = run.settings()
    with Journal(None if journal is None else Path(journal), settings) as kept:
        run.run(kept, _progress_bar(progress))
        return make_report(name or settings["model"], settings, run.tasks, run.keys(), kept)


def _check_lengths(lengths: Sequence[int], most: int) -> list[int]:
    found = sorted(set(lengths))
    if not found or found[0] < 1:
        raise ConfigError(f"lengths is {lengths!r}, must be one or more numbers of tokens, like [4096, 8192]")
    if found[-1] > most:
        raise ConfigError(
            f"length {found[-1]:,} is above max_model_len ({most:,}): give shorter ones, or raise max_model_len if the "
            f"model and the cache memory reach further"
        )
    return found


def _check_at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name} is {value}, must be at least 1")
    return value


class _Run:
    """One evaluation."""

    def __init__(
        self,
        llm: LLM,
        tasks: list[Task],
        lengths: list[int],
        *,
        num_samples: int,
        builder: Builder,
        reuse: bool,
        compares: bool,
    ) -> None:
        self.llm, self.tasks, self.lengths = llm, tasks, lengths
        self._num_samples = num_samples
        self._builder = builder
        self._reuse, self._compares = reuse, compares

    def settings(self) -> Record:
        """Return what the samples and their answers depend on."""
        plan = self.llm.engine_plan
        return {
            "model": plan.info.architecture,
            "tokenizer": Path(self._builder.prompts.tokenizer.name_or_path).name,
            "parameters": plan.info.num_parameters,
            "dtype": str(plan.dtype).removeprefix("torch."),
            **({} if plan.quantization is None else {"quantization": plan.quantization}),
            "groups": [
                group.spec.kind + ("" if group.block_size == ENDLESS else f" in blocks of {group.block_size} tokens")
                for group in plan.memory.groups
            ],
            "tasks": {task.name: task.about for task in self.tasks},
            "lengths": self.lengths,
            "num_samples": {task.name: task.num_samples(self._num_samples) for task in self.tasks},
            "seed": self._builder.seed,
            "prompt_format": self._builder.prompts.format,
            "max_tokens": self._builder.max_tokens,
            "texts": self._builder.texts.sources(),
            "reuse": self._reuse,
            "compares_without_reuse": self._compares,
        }

    def check(self) -> None:
        """Make the first samples of each task and length, and all others as short as they can be.

        Raises ConfigError for what can't be run.
        """
        for task, batch in self._batches():
            for length, number in batch:
                self._builder.makes_shortest = number > 0
                task.make_group(self._builder, length, number)
        self._builder.makes_shortest = False

    def keys(self) -> dict[str, tuple[str, int]]:
        """Return the keys of all samples, and each one's task and length."""
        return {
            sample_key(task.name, length, index): (task.name, length)
            for task, batch in self._batches()
            for length, number in batch
            for index in task.indexes(number)
        }

    def _batches(self) -> Iterator[tuple[Task, list[GroupId]]]:
        for task in self.tasks:
            for batch in task.batches(self.lengths, self._num_samples):
                yield task, batch

    def run(self, journal: Journal, bar: Progress) -> None:
        """Run what the journal lacks."""
        lengths = [length for _, length in self.keys().values()]
        done = sum(record["length"] for record in journal.records.values())
        with bar:
            shown = bar.add_task("", total=sum(lengths), completed=done)
            for task, batch in self._batches():
                samples = [sample for group in batch for sample in self._missing(task, group, journal)]
                for records in self._run_batch(task, samples):
                    journal.add(records)
                    bar.update(
                        shown,
                        description=f"{task.name} {len(journal.records)}/{len(lengths)}",
                        advance=sum(record["length"] for record in records),
                    )

    def _missing(self, task: Task, group: GroupId, journal: Journal) -> list[Sample]:
        length, number = group
        if all(sample_key(task.name, length, index) in journal.records for index in task.indexes(number)):
            return []
        samples = task.make_group(self._builder, length, number)
        return [sample for sample in samples if sample.key not in journal.records]

    def _run_batch(self, task: Task, samples: list[Sample]) -> Iterator[list[Record]]:
        """Run samples together; yield the records of those that are finished, as they are."""
        if not samples:
            return
        rendered = [self._builder.prompts.render(sample) for sample in samples]
        order = shared_order(rendered)
        samples, prompts = [samples[i] for i in order], [rendered[i] for i in order]
        unique = num_unique_tokens(prompts)
        without: dict[int, tuple[RequestOutput, float]] = {}
        if self._compares:
            without = {i: (output, s) for i, output, s in self._answers(samples, prompts, reuse=False)}
        for index, output, seconds in self._answers(samples, prompts, reuse=self._reuse):
            record = _record(task, samples[index], output, seconds)
            # Of the batch; on the record that comes first, so that a sum counts it once.
            record["unique_tokens"], unique = unique, 0
            if self._compares:
                other, record["seconds_without_reuse"] = without[index]
                same = _record(task, samples[index], other, 0.0)
                record["computed_without_reuse"] = same["computed_tokens"]
                record["score_without_reuse"] = same["score"]
                record["is_same_answer"] = same["answer"] == record["answer"]
            yield [record]

    def _answers(
        self, samples: list[Sample], prompts: list[list[int]], *, reuse: bool
    ) -> Iterator[tuple[int, RequestOutput, float]]:
        """Yield each sample's index, its output, and the seconds since the output before."""
        caps = [
            len(ids) - 1 if sample.scored_from is None else sample.scored_from - 1
            for sample, ids in zip(samples, prompts, strict=True)
        ]
        asked: list[dict[str, Any]] = [
            # A salt of its own: what one way computes can't be found by the other.
            {"prompt_token_ids": ids, "message_boundaries": parts, "cache_salt": "" if reuse else "without reuse"}
            for ids, parts in zip(prompts, junctions(prompts, caps), strict=True)
        ]
        start = time.perf_counter()
        for index, output in self.llm.as_completed(asked, [_sampling(s, reuse=reuse) for s in samples], progress=False):
            _check_whole(samples[index], prompts[index], output)
            now = time.perf_counter()
            yield index, output, now - start
            # What the caller does with it is not the model's time.
            start = time.perf_counter()


def _sampling(sample: Sample, *, reuse: bool) -> SamplingParams:
    if sample.scored_from is None:
        return SamplingParams(max_tokens=sample.max_tokens, temperature=0, skip_reading_prefix_cache=not reuse)
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        prompt_logprobs=0,
        prompt_logprob_start=sample.scored_from,
        skip_reading_prefix_cache=not reuse,
    )


def _check_whole(sample: Sample, prompt: list[int], output: RequestOutput) -> None:
    """Raise TruncatedError unless the whole prompt was run and the answer had all the room it was promised."""
    answer = output.outputs[0]
    if output.prompt_token_ids != prompt:
        raise TruncatedError(f"{sample.key}: {len(output.prompt_token_ids)} of {len(prompt)} prompt tokens were run")
    is_cut = answer.finish_reason != "stop" and len(answer.token_ids) < sample.max_tokens
    if is_cut:
        raise TruncatedError(
            f"{sample.key}: the answer ended with {answer.finish_reason!r} after {len(answer.token_ids)} of "
            f"{sample.max_tokens} tokens"
        )


def _record(task: Task, sample: Sample, output: RequestOutput, seconds: float) -> Record:
    assert output.cache is not None, f"{sample.key} ended without having run"
    record: Record = {
        "key": sample.key,
        "task": sample.task,
        "length": sample.length,
        "depth": sample.depth,
        "prompt_tokens": len(output.prompt_token_ids),
        "computed_tokens": output.cache.num_computed,
        "answer_tokens": len(output.outputs[0].token_ids),
        "seconds": round(seconds, 6),
    }
    if sample.scored_from is not None:
        pieces = _mean_losses(output, sample.scored_from)
        return record | {"answer": "", "pieces": pieces, "score": math.fsum(pieces) / len(pieces)}
    text = output.outputs[0].text
    score = task.metric(clean(text), sample.references)
    return record | {"answer": text, "references": list(sample.references), "score": score}


def _mean_losses(output: RequestOutput, start: int) -> list[float]:
    """Return the mean negative log-probability of each piece of the prompt from a token on; a short rest joins none."""
    assert output.prompt_logprobs is not None, f"request {output.request_id} has no log-probabilities"
    rows = zip(output.prompt_token_ids[start:], output.prompt_logprobs[start:], strict=True)
    losses = [-(row or {})[token_id].logprob for token_id, row in rows]
    size = min(PIECE_TOKENS, len(losses))
    return [math.fsum(losses[i : i + size]) / size for i in range(0, len(losses) - size + 1, size)]


def _progress_bar(wanted: bool | None) -> Progress:
    is_shown = sys.stderr.isatty() if wanted is None else wanted
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not is_shown,
    )
