"""One fact in a long text: needle maps, passkeys, and many questions on one document."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import accumulate

from hybrid_engine.evals.metrics import whole_word_found
from hybrid_engine.evals.samples import Builder, Group, Sample
from hybrid_engine.evals.tasks.base import GroupId, Task
from hybrid_engine.evals.texts import NOISE, Texts
from hybrid_engine.evals.words import new_names

KINDS = ("code", "number", "key", "price", "room", "street", "sign", "age")


def prose(texts: Texts, start: int, count: int) -> list[str]:
    """Return so many sentences of the haystack from one on; it begins anew as often as it must."""
    known = texts.essay_sentences
    return [known[(start + i) % len(known)] for i in range(count)]


def with_facts(sentences: Sequence[str], facts: Sequence[tuple[int, str]]) -> str:
    """Return sentences with facts between them, each before the sentence of a number. facts: sorted by it."""
    parts: list[str] = []
    last = 0
    for place, fact in facts:
        parts += [*sentences[last:place], fact]
        last = place
    return " ".join([*parts, *sentences[last:]])


def place_at(depth: float, sentences: Sequence[str]) -> int:
    """Return the sentence that begins nearest to a depth of the text, 0 to 1, by characters; one more for its end."""
    begins = [0, *accumulate(len(sentence) + 1 for sentence in sentences)]
    return min(range(len(begins)), key=lambda i: abs(begins[i] - depth * begins[-1]))


class Needle:
    """A fact that nobody can guess, and what asks for it."""

    def __init__(self, rng: random.Random, name: str) -> None:
        self.what = f"{rng.choice(KINDS)} of {name}"
        self.value = str(rng.randint(1000, 99999))

    @property
    def statement(self) -> str:
        """The sentence that says it."""
        return f"The {self.what} is {self.value}."

    @property
    def question(self) -> str:
        """What asks for it."""
        return f"\nWhat is the {self.what}?"

    @property
    def cue(self) -> str:
        """How an answer begins where no chat template asks for one."""
        return f"\nThe {self.what} is"


class NeedleMap(Task):
    """One needle at each depth of each length, in the same prose, so that prompts share all that lies before it."""

    name = "needle_map"
    max_tokens = 16
    metric = staticmethod(whole_word_found)

    def __init__(self, num_depths: int = 11) -> None:
        self.num_depths = num_depths
        self.about = f"a fact in prose at {num_depths} depths of each length: a heat map"

    def num_groups(self, num_samples: int) -> int:
        """Return whole rounds: each depth is asked equally often."""
        return -(-num_samples // self.num_depths) * self.num_depths

    def batches(self, lengths: Sequence[int], num_samples: int) -> Iterator[list[GroupId]]:
        """Yield all depths of all lengths together: they share their prose."""
        for first in range(0, self.num_groups(num_samples), self.num_depths):
            yield [(length, first + depth) for length in lengths for depth in range(self.num_depths)]

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        return builder.fit(self.name, length, lambda n: [self._sample(builder, length, number, n)])

    def _sample(self, builder: Builder, length: int, number: int, num_units: int) -> Sample:
        round_number, depth_index = divmod(number, self.num_depths)
        depth = depth_index / (self.num_depths - 1) if self.num_depths > 1 else 0.5
        rng = builder.rng(self.name, length, number)
        needle = Needle(rng, new_names(rng, 1)[0])
        start = builder.rng(self.name, round_number).randrange(10**6)
        sentences = prose(builder.texts, start, num_units)
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=with_facts(sentences, [(place_at(depth, sentences), needle.statement)]),
            question=needle.question,
            cue=needle.cue,
            references=(needle.value,),
            max_tokens=builder.budget(self.max_tokens),
            depth=round(depth, 3),
        )


class Passkey(Task):
    """A number in noise, at a random depth (arXiv 2305.16300, appendix)."""

    name = "passkey"
    about = "a number in repeated noise, at a random depth"
    max_tokens = 16
    metric = staticmethod(whole_word_found)

    INTRODUCTION = (
        "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. I will quiz you "
        "about the important information there."
    )

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        return builder.fit(self.name, length, lambda n: [self._sample(builder, length, number, n)])

    def _sample(self, builder: Builder, length: int, number: int, num_units: int) -> Sample:
        rng = builder.rng(self.name, length, number)
        key, depth = str(rng.randint(10000, 99999)), rng.random()
        text = with_facts([NOISE] * num_units, [(round(depth * num_units), self._statement(key))])
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=f"{self.INTRODUCTION} {text}",
            question="\nWhat is the pass key?",
            cue=" The pass key is",
            references=(key,),
            max_tokens=builder.budget(self.max_tokens),
        )

    @staticmethod
    def _statement(key: str) -> str:
        return f"The pass key is {key}. Remember it. {key} is the pass key."


class Recall(Task):
    """Many facts in prose, and as many questions on the one document."""

    name = "recall"
    max_tokens = 16
    metric = staticmethod(whole_word_found)

    def __init__(self, questions_per_document: int = 20) -> None:
        self.questions_per_document = questions_per_document
        self.about = f"{questions_per_document} facts in prose, and a question on each of the same document"

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one document and its questions."""
        return builder.fit(
            self.name,
            length,
            lambda n: self._samples(builder, length, number, n),
            at_least=self.questions_per_document,
        )

    def _samples(self, builder: Builder, length: int, number: int, num_units: int) -> Group:
        rng = builder.rng(self.name, length, number)
        needles = [Needle(rng, name) for name in new_names(rng, self.questions_per_document)]
        sentences = prose(builder.texts, rng.randrange(10**6), num_units)
        places = sorted(rng.sample(range(num_units), len(needles)))
        facts = [(place, needle.statement) for place, needle in zip(places, needles, strict=True)]
        document = with_facts(sentences, facts)
        return [
            Sample(
                task=self.name,
                length=length,
                index=index,
                document=document,
                question=needle.question,
                cue=needle.cue,
                references=(needle.value,),
                max_tokens=builder.budget(self.max_tokens),
            )
            for index, needle in zip(self.indexes(number), needles, strict=True)
        ]
