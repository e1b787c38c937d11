"""One question about one document, and how filler is added until a prompt has the length that was asked for."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from hybrid_engine.errors import ConfigError
from hybrid_engine.evals.prompts import Prompts
from hybrid_engine.evals.texts import Texts

GOOD_ENOUGH = 0.995
"""A prompt that reaches this part of its length gets no more filler."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One prompt, as text: the prompt format decides what stands between its parts."""

    task: str
    length: int
    """Tokens that prompt and answer may take together."""
    index: int
    document: str
    question: str
    """Begins with whatever parts it from the document."""
    references: tuple[str, ...] = ()
    answer_prefix: str = ""
    """What the answer is made to begin with."""
    cue: str = ""
    """What stands behind the question where there is no chat template to ask for an answer."""
    max_tokens: int = 16
    depth: float | None = None
    """Where in the document the answer stands, 0 to 1."""
    token_ids: tuple[int, ...] = field(default=(), repr=False)
    """Instead of a text: the prompt as it is."""
    scored_from: int | None = None
    """Set where nothing is asked: the first token of the prompt whose probability counts."""

    @property
    def key(self) -> str:
        """Names the sample in a journal."""
        return sample_key(self.task, self.length, self.index)


def sample_key(task: str, length: int, index: int) -> str:
    """Return the name of a sample in a journal."""
    return f"{task}@{length}#{index}"


Group = list[Sample]
"""The questions on one document."""


class LengthError(ConfigError):
    """A length is below what a task needs, or above what its texts give."""


class Builder:
    """Makes groups of samples that have the length asked for, as the model's own tokenizer counts it."""

    def __init__(self, prompts: Prompts, texts: Texts, *, seed: int, max_tokens: int | None = None) -> None:
        """seed: decides every draw. max_tokens: the answers' budget; None: each task's own."""
        self.prompts = prompts
        self.texts = texts
        self.seed = seed
        self.makes_shortest = False
        """Whether groups get no more filler than they need: to see quickly whether all of them can be made."""
        self.max_tokens = max_tokens
        self._num_units: dict[tuple[str, int], int] = {}

    @cached_property
    def essay_token_ids(self) -> list[int]:
        """The haystack as tokens, without any that begins a text."""
        return self.prompts.encode(self.texts.essay_text, add_special_tokens=False)

    def rng(self, *what: object) -> random.Random:
        """Return a generator for one purpose: the same seed and purpose give the same draws."""
        return random.Random("/".join(map(str, (self.seed, *what))))

    def budget(self, tokens: int) -> int:
        """Return how many tokens an answer may take, which the task would set to `tokens`."""
        return self.max_tokens or tokens

    def fit(
        self, task: str, length: int, make: Callable[[int], Group], *, at_least: int = 1, at_most: int | None = None
    ) -> Group:
        """Return the group with the most filler that still fits.

        make: makes it with so many units of filler; the same number always gives the same. at_least, at_most: limits of
        that number. Raises LengthError when the least doesn't fit, or the most falls far short.
        """
        best = make(at_least)
        sizes = [self._size(sample) for sample in best]
        size = least_size = max(sizes)
        # All of a group share their filler: the one that is longest now stays so, or nearly.
        longest = sizes.index(size)
        if size > length:
            budget = max(sample.max_tokens for sample in best)
            raise LengthError(
                f"{task} at length {length:,}: its shortest prompt has {size - budget:,} tokens and the answer may "
                f"take {budget:,}, together {size:,}: give a length of about that or more"
            )
        if self.makes_shortest:
            return best
        low, high = at_least, at_most + 1 if at_most is not None else None
        guess = self._num_units.get((task, length), 2 * at_least + 8)
        while size < length * GOOD_ENOUGH and (high is None or high - low > 1):
            probe = max(low + 1, guess) if high is None else min(max(low + 1, guess), high - 1)
            found = make(probe)
            probed_size = self._size(found[longest])
            unit = (probed_size - least_size) / (probe - at_least)
            if probed_size <= length:
                low, best, size = probe, found, probed_size
            else:
                high = probe
            guess = at_least + int((length - least_size) / max(unit, 1e-3))
            # Where units differ much the straight line may not come near: halve then.
            if high is not None and not low < guess < high:
                guess = (low + high) // 2
        while low > at_least and any(self._size(sample) > length for sample in best):
            low -= 1
            best = make(low)
        self._num_units[task, length] = low
        if low == at_most and size < length * GOOD_ENOUGH / 2:
            raise LengthError(f"{task} at length {length:,}: its texts end after {size:,} tokens: give longer ones")
        return best

    def _size(self, sample: Sample) -> int:
        return len(self.prompts.render(sample)) + sample.max_tokens
