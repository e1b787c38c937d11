"""RULER's eight needle tasks (arXiv 2404.06654, table 1; prompts and sizes as in its code, NVIDIA/RULER, Apache-2.0).

Prompts must be the published ones, word for word, or scores can't be compared. What differs: random draws come from our
own generator, sentences end where a capital letter follows a full stop (RULER asks NLTK), and the haystack of prose is
another text unless one is given.
"""

from __future__ import annotations

import random
import uuid
from dataclasses import dataclass
from typing import Literal

from hybrid_engine.evals.samples import Builder, Group, Sample
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.evals.texts import NOISE, Texts, split_sentences

Kind = Literal["words", "numbers", "uuids"]
Haystack = Literal["noise", "essay", "needle"]

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
DOCUMENT = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. "
    "I will quiz you about the {kind} afterwards.\n{context}"
)
QUESTION = "\nWhat are all the special magic {kind} for {query} mentioned in the provided text?"
ANSWER_PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
HAYSTACKS = {"noise": "noise", "essay": "prose", "needle": "others of their kind"}
DEPTHS = [round(100 * i / 39) for i in range(40)]


@dataclass
class NeedleTask(Task):
    """Needles in a haystack: keys with values are hidden, and asked for."""

    name: str
    haystack: Haystack
    key_kind: Kind = "words"
    value_kind: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_queries: int = 1
    max_tokens: int = 128

    def __post_init__(self) -> None:
        keys, values = _count(max(self.num_keys, self.num_queries), "key"), _count(self.num_values, "value")
        hidden = f"{keys} ({self.key_kind}) with {values} ({self.value_kind}) in {HAYSTACKS[self.haystack]}"
        self.about = f"RULER: {hidden}; {_count(self.num_queries, 'key')} asked for"

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one sample."""
        num_needles = max(self.num_keys, self.num_queries) * self.num_values
        least = 1 if self.haystack == "essay" else num_needles
        return builder.fit(self.name, length, lambda n: [self._sample(builder, length, number, n)], at_least=least)

    def _sample(self, builder: Builder, length: int, number: int, num_units: int) -> Sample:
        rng = builder.rng(self.name, length, number)
        keys = [self._draw(rng, self.key_kind, builder.texts) for _ in range(max(self.num_keys, self.num_queries))]
        values = [[self._draw(rng, self.value_kind, builder.texts) for _ in range(self.num_values)] for _ in keys]
        needles = [self._needle(key, value) for key, own in zip(keys, values, strict=True) for value in own]
        rng.shuffle(needles)
        asked = rng.sample(range(len(keys)), self.num_queries)
        queries = [keys[i] for i in asked]
        query = f"{', '.join(queries[:-1])}, and {queries[-1]}" if len(queries) > 1 else queries[0]
        kind: str = self.value_kind
        document, question, prefix = DOCUMENT, QUESTION, ANSWER_PREFIX
        if self.num_queries * self.num_values == 1:
            document, question, prefix = (_in_singular(part) for part in (document, question, prefix))
            kind = kind.removesuffix("s")
        context = self._context(rng, needles, num_units, builder.texts)
        return Sample(
            task=self.name,
            length=length,
            index=number,
            document=document.format(kind=kind, context=context),
            question=question.format(kind=kind, query=query),
            answer_prefix=prefix.format(kind=kind, query=query),
            references=tuple(value for i in asked for value in values[i]),
            max_tokens=builder.budget(self.max_tokens),
        )

    def _needle(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value_kind, key=key, value=value)

    def _context(self, rng: random.Random, needles: list[str], num_units: int, texts: Texts) -> str:
        if self.haystack == "essay":
            return insert_at_depths(rng, needles, essay_sentences(texts, num_units))
        sentences = [NOISE] * num_units
        if self.haystack == "needle":
            draw = [(self._draw(rng, self.key_kind, texts), self._draw(rng, self.value_kind, texts)) for _ in sentences]
            sentences = [self._needle(key, value) for key, value in draw]
        places = sorted(rng.sample(range(num_units), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            sentences.insert(place, needle)
        return "\n".join(sentences)

    @staticmethod
    def _draw(rng: random.Random, kind: Kind, texts: Texts) -> str:
        if kind == "numbers":
            return str(rng.randint(10**6, 10**7 - 1))
        if kind == "uuids":
            return str(uuid.UUID(int=rng.getrandbits(128), version=4))
        nouns, adjectives = texts.nouns_and_adjectives
        return f"{rng.choice(adjectives)}-{rng.choice(nouns)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _in_singular(text: str) -> str:
    return text.replace("Some", "A").replace("are all", "is").replace("are", "is")


def essay_sentences(texts: Texts, num_words: int) -> list[str]:
    """Return the sentences of the haystack's first words; it begins anew as often as it must."""
    words = texts.essay_words
    repeats = -(-num_words // len(words))
    return split_sentences(" ".join((words * repeats)[:num_words]))


def insert_at_depths(rng: random.Random, needles: list[str], sentences: list[str]) -> str:
    """Return the sentences with each needle at a depth of its own, in the order of the needles."""
    depths = sorted(rng.sample(DEPTHS, len(needles)))
    places = [int(len(sentences) * depth / 100) for depth in depths]
    parts: list[str] = []
    for needle, start, end in zip(needles, [0, *places], places, strict=False):
        parts += [" ".join(sentences[start:end]), needle]
    return " ".join([*parts, " ".join(sentences[places[-1] :])])


NEEDLE_TASKS = [
    NeedleTask("niah_single_1", "noise"),
    NeedleTask("niah_single_2", "essay"),
    NeedleTask("niah_single_3", "essay", value_kind="uuids"),
    NeedleTask("niah_multikey_1", "essay", num_keys=4),
    NeedleTask("niah_multikey_2", "needle"),
    NeedleTask("niah_multikey_3", "needle", key_kind="uuids", value_kind="uuids"),
    NeedleTask("niah_multivalue", "essay", num_values=4),
    NeedleTask("niah_multiquery", "essay", num_queries=4),
]
