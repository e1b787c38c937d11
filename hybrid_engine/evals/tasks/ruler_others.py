"""RULER's other five tasks: variable tracking, common and frequent words, questions (arXiv 2404.06654, NVIDIA/RULER).

As with the needles: the prompts are the published ones, the random draws our own.
"""

from __future__ import annotations

import math
import random
import string
from collections.abc import Callable
from itertools import pairwise

from hybrid_engine.evals.metrics import any_found
from hybrid_engine.evals.samples import Builder, Group, LengthError, Sample
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.evals.texts import NOISE, QuestionSet, Texts

SHORT = 4096
"""Below this length RULER takes other sizes for the words to count."""


class VariableTracking(Task):
    """A chain of assignments in noise; asked are all variables that got the value. One solved example comes first."""

    name = "vt"
    about = "RULER: which variables got a value, over a chain of 4 assignments"
    max_tokens = 30
    num_hops = 4
    example_tokens = 500

    DOCUMENT = "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}"
    QUESTION = "\nQuestion: Find all variables that are assigned the value {value} in the text above."
    ANSWER_PREFIX = (
        " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned "
        "the value {value}, they are: "
    )

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        rng = builder.rng(self.name, length, number, "example")
        example = self._example(rng, builder)
        least = self.num_hops + 1

        def make(num_units: int) -> Group:
            return [self._sample(builder, length, number, num_units, example)]

        return builder.fit(self.name, length, make, at_least=least)

    def _sample(self, builder: Builder, length: int, number: int, num_units: int, example: str) -> Sample:
        rng = builder.rng(self.name, length, number)
        value = str(rng.randrange(10000, 99999))
        names, context = self._chain(rng, value, num_units, name_letters=5)
        facts = {"value": value, "count": self.num_hops + 1}
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=f"{example}\n{self.DOCUMENT.format(context=context)}",
            question=self.QUESTION.format(**facts),
            answer_prefix=self.ANSWER_PREFIX.format(**facts),
            references=tuple(names),
            max_tokens=builder.budget(self.max_tokens),
        )

    def _example(self, rng: random.Random, builder: Builder) -> str:
        """Return a solved example of about 500 tokens; its names have 3 letters, its value 5 digits."""
        value = str(rng.randrange(10000, 99999))
        state = rng.getstate()

        def solved(num_units: int) -> str:
            rng.setstate(state)
            names, context = self._chain(rng, value, num_units, name_letters=3)
            facts = {"value": value, "count": self.num_hops + 1}
            parts = (self.DOCUMENT.format(context=context), self.QUESTION.format(**facts))
            return f"{''.join(parts)}{self.ANSWER_PREFIX.format(**facts)} {' '.join(names)}\n"

        num_units = self.num_hops + 1
        while len(builder.prompts.encode(solved(num_units + 1))) <= self.example_tokens:
            num_units += 1
        return solved(num_units)

    def _chain(self, rng: random.Random, value: str, num_units: int, *, name_letters: int) -> tuple[list[str], str]:
        names: list[str] = []
        while len(names) <= self.num_hops:
            name = "".join(rng.choices(string.ascii_uppercase, k=name_letters))
            names += [name] if name not in names else []
        chain = [f"VAR {names[0]} = {value}"]
        chain += [f"VAR {after} = VAR {before} " for before, after in pairwise(names)]
        sentences = [NOISE] * num_units
        for i, place in enumerate(sorted(rng.sample(range(num_units), len(chain)))):
            sentences.insert(place + i, chain[i])
        return names, "\n".join(sentences).replace(". \n", ".\n")


class CommonWords(Task):
    """A numbered list of words, ten of them more often than the others. One solved example comes first."""

    name = "cwe"
    about = "RULER: the 10 words that stand most often in a list"
    max_tokens = 120
    num_common = 10

    DOCUMENT = (
        "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
        "appear most often.\n{context}"
    )
    QUESTION = "\nQuestion: What are the 10 most common words in the above list?"
    ANSWER_PREFIX = " Answer: The top 10 words that appear most often in the list are:"

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        most = max(len(builder.texts.common_words), len(builder.texts.more_words))

        def make(num_units: int) -> Group:
            return [self._sample(builder, length, number, num_units)]

        try:
            return builder.fit(self.name, length, make, at_least=self.num_common, at_most=most)
        except LengthError as error:
            if most > len(builder.texts.common_words) or "end after" not in str(error):
                raise
            raise LengthError(f"{error}; cwe takes words from a file (words=, --words)") from error

    def _sample(self, builder: Builder, length: int, number: int, num_words: int) -> Sample:
        rng = builder.rng(self.name, length, number)
        (num_example, *example_counts), counts = ((20, 3, 1), (6, 1)) if length < SHORT else ((40, 10, 3), (30, 3))
        example, example_answer = self._list(rng, builder.texts, num_example, *example_counts)
        context, common = self._list(rng, builder.texts, num_words, *counts)
        solved = self.DOCUMENT.format(context=example) + self.QUESTION + self.ANSWER_PREFIX
        solved += f" {_numbered(example_answer)}"
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=f"{solved}\n{self.DOCUMENT.format(context=context)}",
            question=self.QUESTION,
            answer_prefix=self.ANSWER_PREFIX,
            references=tuple(common),
            max_tokens=builder.budget(self.max_tokens),
        )

    def _list(
        self, rng: random.Random, texts: Texts, num_words: int, num_common: int, num_other: int
    ) -> tuple[str, list[str]]:
        """Return the list and its common words. num_common, num_other: how often each word stands in it."""
        known = texts.common_words if num_words <= len(texts.common_words) else texts.more_words
        words = rng.sample(known, num_words)
        common, others = words[: self.num_common], words[self.num_common :]
        listed = common * num_common + others * num_other
        rng.shuffle(listed)
        return _numbered(listed), common


def _numbered(words: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(words, start=1))


class FrequentWords(Task):
    """Coded words whose frequencies follow a zeta distribution; the most frequent one is replaced by dots."""

    name = "fwe"
    about = "RULER: the 3 most frequent words of a coded text"
    max_tokens = 50
    alpha, zeta_of_alpha = 2, math.pi**2 / 6
    word_letters = 6

    DOCUMENT = (
        "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
        "appeared coded words. {context}"
    )
    QUESTION = (
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently "
        "appeared words in the above coded text?"
    )
    ANSWER_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        # Fewer words and the third and fourth most frequent ones could be equally frequent.
        return builder.fit(self.name, length, lambda n: [self._sample(builder, length, number, n)], at_least=60)

    def _sample(self, builder: Builder, length: int, number: int, num_words: int) -> Sample:
        rng = builder.rng(self.name, length, number)
        budget = builder.budget(self.max_tokens)
        vocabulary: dict[str, None] = {"...": None}
        while len(vocabulary) < max(5, (length - budget) // 50):
            vocabulary["".join(rng.choices(string.ascii_lowercase, k=self.word_letters))] = None
        coded = list(vocabulary)
        counts = [int(num_words * rank**-self.alpha / self.zeta_of_alpha) for rank in range(1, len(coded) + 1)]
        words = [word for word, count in zip(coded, counts, strict=True) for _ in range(count)]
        rng.shuffle(words)
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=self.DOCUMENT.format(context=" ".join(words)),
            question=self.QUESTION,
            answer_prefix=self.ANSWER_PREFIX,
            references=tuple(coded[1:4]),
            max_tokens=budget,
        )


class Questions(Task):
    """Questions on documents among others that don't matter."""

    max_tokens = 32
    metric = staticmethod(any_found)

    DOCUMENT = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words.\n\nThe following are given documents.\n\n{context}\n\n"
    )
    QUESTION = (
        "Answer the question based on the given documents. Only give me the answer and do not output any other "
        "words.\n\nQuestion: {query}"
    )
    ANSWER_PREFIX = " Answer:"

    def __init__(self, name: str, about: str, questions: Callable[[Texts], QuestionSet]) -> None:
        self.name, self.about, self._questions = name, about, questions

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        known = self._questions(builder.texts)
        least = len(known.questions[number % len(known.questions)].documents)
        return builder.fit(self.name, length, lambda n: [self._sample(builder, length, number, n)], at_least=least)

    def _sample(self, builder: Builder, length: int, number: int, num_documents: int) -> Sample:
        known = self._questions(builder.texts)
        asked = known.questions[number % len(known.questions)]
        chosen = self._documents(builder.rng(self.name, length, number), known, number, num_documents)
        context = "\n\n".join(f"Document {i}:\n{known.documents[which]}" for i, which in enumerate(chosen, start=1))
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=self.DOCUMENT.format(context=context),
            question=self.QUESTION.format(query=asked.text),
            answer_prefix=self.ANSWER_PREFIX,
            references=asked.answers,
            max_tokens=builder.budget(self.max_tokens),
        )

    def _documents(self, rng: random.Random, known: QuestionSet, number: int, count: int) -> list[int]:
        asked = known.questions[number % len(known.questions)]
        chosen = list(asked.documents)
        others = [i for i in range(len(known.documents)) if i not in {*asked.documents, *asked.related}]
        for pool in (asked.related, others):
            chosen += rng.sample(pool, min(len(pool), max(0, count - len(chosen))))
        # Where a text has fewer documents they come again.
        chosen = (chosen * -(-count // len(chosen)))[:count]
        rng.shuffle(chosen)
        return chosen


OTHER_TASKS = [
    VariableTracking(),
    CommonWords(),
    FrequentWords(),
    Questions("qa_1", "RULER: a question on one of many documents", lambda texts: texts.single_hop),
    Questions("qa_2", "RULER: a question on two of many documents", lambda texts: texts.two_hop),
]
