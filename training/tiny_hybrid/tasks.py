"""What is learned beside English: to recall what was said, and to repeat. All made from a random generator.

A sample is a conversation as the chat template writes it. Its pieces carry weights: how much their tokens count in the
loss. What nobody can know (a new word, a new number) counts nothing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from training.tiny_hybrid.text import english

BEGIN, END = "<|begin|>", "<|end|>"
ROLES = {role: f"<|{role}|>" for role in ("system", "user", "assistant")}

ANSWER, ENGLISH, PROMPT = 1.0, 0.2, 0.02
"""Weights of the pieces."""

ATTRIBUTES = [
    "code",
    "number",
    "key",
    "word",
    "name",
    "colour",
    "price",
    "age",
    "room",
    "street",
    "friend",
    "secret",
    "answer",
    "sign",
    "letter",
    "day",
    "song",
    "house",
    "garden",
    "horse",
    "ship",
    "town",
    "book",
    "hat",
]
ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "cr",
    "dr",
    "fl",
    "gr",
    "pl",
    "sh",
    "st",
    "th",
    "tr",
]
VOWELS = ["a", "e", "i", "o", "u"]
CODAS = ["b", "d", "g", "k", "l", "m", "n", "p", "r", "s", "t", "x"]
CHARACTERS_PER_TOKEN = 3.4
"""Of English, roughly; only to fill a sample to about its length."""


@dataclass(frozen=True)
class Piece:
    """Some text of a sample."""

    text: str
    weight: float


@dataclass(frozen=True)
class Fact:
    """Something that is said once and asked later."""

    name: str
    attribute: str
    value: str

    def statement(self, rng: random.Random) -> str:
        """A sentence that says it."""
        form = rng.choice(("The {attribute} of {name} is", "Remember: the {attribute} of {name} is"))
        return f" {form.format(attribute=self.attribute, name=self.name)} {self.value}."

    def question(self, rng: random.Random) -> str:
        """What asks for it: a question, or the beginning of a sentence."""
        what = f"the {self.attribute} of {self.name}"
        return rng.choice((f"What is {what}?", f"T{what[1:]} is"))

    @property
    def answer(self) -> str:
        """What the assistant has to say."""
        return f" {self.value}."


def message(role: str, *pieces: Piece) -> list[Piece]:
    """A message as the chat template writes it; that the assistant ends its own has to be learned."""
    return [Piece(ROLES[role], PROMPT), *pieces, Piece(END, ANSWER if role == "assistant" else PROMPT)]


def word(rng: random.Random, num_syllables: int) -> str:
    """A word that nobody has seen."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(num_syllables)]
    return "".join(syllables) + rng.choice(CODAS + [""] * len(CODAS))


def value(rng: random.Random) -> str:
    """A number or a word."""
    if rng.random() < 0.6:
        num_digits = rng.randint(3, 5)
        return str(rng.randrange(10 ** (num_digits - 1), 10**num_digits))
    return word(rng, rng.randint(1, 2))


def facts(rng: random.Random, count: int) -> list[Fact]:
    """Facts about different names."""
    names: dict[str, None] = {}
    while len(names) < count:
        names[word(rng, 2).capitalize()] = None
    return [Fact(name, rng.choice(ATTRIBUTES), value(rng)) for name in names]


def filler(rng: random.Random, num_tokens: int, *, held_out: bool = False) -> str:
    """A stretch of English, about so many tokens long."""
    paragraphs = english()[held_out]
    wanted = int(num_tokens * CHARACTERS_PER_TOKEN)
    index, text = rng.randrange(len(paragraphs)), ""
    while len(text) < wanted:
        text += " " + paragraphs[index % len(paragraphs)]
        index += 1
    start = rng.randrange(max(1, len(text) - wanted))
    cut = text[start : start + wanted]
    return cut[cut.find(" ") :]


STATEMENT_TOKENS, QUESTION_TOKENS, PAIR_TOKENS = 12, 19, 9
"""What a fact, a question with its answer, and a pair take, roughly."""


def recall_task(rng: random.Random, num_tokens: int) -> list[Piece]:
    """Facts among English, and questions about them: all at the end, or on the way."""
    filler_share = rng.choice((0.0, 0.1, 0.3, 0.6, 0.85))
    questions_per_fact = rng.choice((0.5, 1.0, 2.0))
    rest = (1 - filler_share) * num_tokens
    count = max(1, round(rest / (STATEMENT_TOKENS + questions_per_fact * QUESTION_TOKENS)))
    told = facts(rng, count)
    num_questions = max(1, int((rest - count * STATEMENT_TOKENS) / QUESTION_TOKENS))
    num_filler = int(filler_share * num_tokens)
    if rng.random() < 0.6:
        return _document_first(rng, told, num_questions, num_filler)
    return _on_the_way(rng, told, num_questions, num_filler)


def document(rng: random.Random, told: list[Fact], num_filler: int, *, held_out: bool = False) -> list[Piece]:
    """Facts in a random order, with about so many tokens of English strewn in between."""
    each = num_filler // (len(told) + 1)
    pieces = []
    for fact in rng.sample(told, len(told)):
        if each >= 8:
            pieces.append(Piece(filler(rng, rng.randrange(2 * each), held_out=held_out), ENGLISH))
        pieces.append(Piece(fact.statement(rng), PROMPT))
    if each >= 8:
        pieces.append(Piece(filler(rng, each, held_out=held_out), ENGLISH))
    return pieces


def _document_first(rng: random.Random, told: list[Fact], num_questions: int, num_filler: int) -> list[Piece]:
    pieces = [Piece(BEGIN, PROMPT), *message("system", *document(rng, told, num_filler))]
    for fact in _asked(rng, told, num_questions):
        pieces += _question(rng, fact)
    return pieces


def _on_the_way(rng: random.Random, told: list[Fact], num_questions: int, num_filler: int) -> list[Piece]:
    rounds = min(len(told), num_questions)
    pieces = [Piece(BEGIN, PROMPT)]
    for number in range(rounds):
        first, last = (len(told) * edge // rounds for edge in (number, number + 1))
        said = document(rng, told[first:last], num_filler // rounds)
        asked = _asked(rng, told[:last], max(1, num_questions // rounds))
        pieces += _question(rng, asked[0], *said)
        for fact in asked[1:]:
            pieces += _question(rng, fact)
    return pieces


def _asked(rng: random.Random, told: list[Fact], count: int) -> list[Fact]:
    """So many of the facts, each once before any comes again."""
    return [fact for _ in range(-(-count // len(told))) for fact in rng.sample(told, len(told))][:count]


def _question(rng: random.Random, fact: Fact, *said_before: Piece) -> list[Piece]:
    text = (" " if said_before else "") + fact.question(rng)
    asked = message("user", *said_before, Piece(text, PROMPT))
    return [*asked, *message("assistant", Piece(fact.answer, ANSWER))]


def copy_task(rng: random.Random, num_tokens: int) -> list[Piece]:
    """Something to repeat word for word: new words, numbers, or English."""
    wanted = max(4, num_tokens // 2 - 5)
    strange = "".join(f" {value(rng)}" for _ in range(max(1, wanted // 4)))
    text = filler(rng, wanted) if rng.random() < 0.2 else strange
    asked = message("user", Piece("Repeat:", PROMPT), Piece(text, PROMPT))
    return [Piece(BEGIN, PROMPT), *asked, *message("assistant", Piece(text, ANSWER))]


def pairs_task(rng: random.Random, num_tokens: int) -> list[Piece]:
    """A list of names with their values, each several times: the densest way to learn to look back."""
    num_pairs = max(2, num_tokens // PAIR_TOKENS)
    told = facts(rng, -(-num_pairs // rng.randint(2, 4)))
    pieces, known = [Piece(BEGIN + ROLES["system"], PROMPT)], set()
    for fact in rng.sample(told * 4, num_pairs):
        pieces += [Piece(f" {fact.name}:", PROMPT), Piece(f" {fact.value}", ANSWER if fact in known else PROMPT)]
        pieces.append(Piece(";", PROMPT))
        known.add(fact)
    return [*pieces, Piece(END, PROMPT)]


def english_task(rng: random.Random, num_tokens: int) -> list[Piece]:
    """Plain English."""
    return [Piece(BEGIN, PROMPT), Piece(filler(rng, num_tokens).lstrip(), ENGLISH)]
