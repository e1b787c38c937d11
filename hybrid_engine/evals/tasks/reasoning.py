"""Facts that must be put together: people and things that move (after BABILong), and chains to follow.

The idea, facts of bAbI's kind scattered in prose, is BABILong's (arXiv 2406.10149); people, things and sentences are
our own, and every document has several questions.
"""

from __future__ import annotations

import random
from abc import abstractmethod
from dataclasses import dataclass, field

from hybrid_engine.evals.metrics import whole_word_found
from hybrid_engine.evals.samples import Builder, Group, Sample
from hybrid_engine.evals.tasks.base import Task
from hybrid_engine.evals.tasks.retrieval import prose, with_facts
from hybrid_engine.evals.words import new_names

PEOPLE = ("Anna", "Boris", "Clara", "David", "Elena")
PLACES = ("kitchen", "garden", "cellar", "library", "attic", "stable", "office")
THINGS = ("lamp", "apple", "letter")
WENT = ("went to", "walked to", "hurried to", "returned to")


@dataclass(frozen=True)
class Asked:
    """A question about some facts."""

    question: str
    answer: str
    cue: str


class ScatteredFacts(Task):
    """Facts in prose, in their order, and several questions on them."""

    max_tokens = 8
    metric = staticmethod(whole_word_found)
    introduction = ""
    family: str
    """Tasks of one family ask about the same documents."""

    @abstractmethod
    def make_facts(self, rng: random.Random) -> list[str]:
        """Return the sentences that say them; the same generator is then given to `ask`."""

    @abstractmethod
    def ask(self, facts: list[str], rng: random.Random) -> list[Asked]:
        """Return the questions."""

    def make_group(self, builder: Builder, length: int, number: int) -> Group:
        """Return one document and its questions."""
        rng = builder.rng(self.family, length, number)
        facts = self.make_facts(rng)
        asked = self.ask(facts, builder.rng(self.name, length, number, "questions"))
        start, draws = rng.randrange(10**6), rng.getrandbits(64)

        def make(num_units: int) -> Group:
            places = sorted(random.Random(draws).choices(range(num_units + 1), k=len(facts)))
            sentences = prose(builder.texts, start, num_units)
            document = self.introduction + with_facts(sentences, list(zip(places, facts, strict=True)))
            return [
                Sample(
                    task=self.name,
                    length=length,
                    index=index,
                    document=document,
                    question=f"\n{each.question}",
                    cue=f"\n{each.cue}",
                    references=(each.answer,),
                    max_tokens=builder.budget(self.max_tokens),
                )
                for index, each in zip(self.indexes(number), asked, strict=True)
            ]

        return builder.fit(self.name, length, make)


@dataclass
class House:
    """Who and what is where; every change is told in a sentence."""

    rng: random.Random
    where: dict[str, str] = field(default_factory=dict)
    holder: dict[str, str | None] = field(default_factory=dict)
    been: dict[str, list[str]] = field(default_factory=dict)
    """The places in which each thing was, the last one last."""
    told: list[str] = field(default_factory=list)

    def move(self, person: str) -> None:
        """Let someone go elsewhere, with what they carry."""
        place = self.rng.choice([place for place in PLACES if place != self.where.get(person)])
        self.where[person] = place
        self.told.append(f"{person} {self.rng.choice(WENT)} the {place}.")
        for thing, holder in self.holder.items():
            if holder == person:
                self.been[thing].append(place)

    def take(self, person: str, thing: str) -> None:
        """Let someone take a thing where they are."""
        self.holder[thing] = person
        self.been.setdefault(thing, []).append(self.where[person])
        self.told.append(f"{person} took the {thing} there.")

    def drop(self, thing: str) -> None:
        """Let its holder put a thing down."""
        self.told.append(f"{self.holder[thing]} put the {thing} down.")
        self.holder[thing] = None


class WhereIsWho(ScatteredFacts):
    """One supporting fact."""

    name = family = "facts_1"
    about = "people who move, among prose: where is someone? (1 supporting fact)"
    questions_per_document = len(PEOPLE)
    introduction = "Somewhere in this text it is said where some people go.\n\n"

    def make_facts(self, rng: random.Random) -> list[str]:
        """Let everybody move, in turns, some of them again."""
        house = House(rng)
        for person in [*PEOPLE, *rng.choices(PEOPLE, k=7)]:
            house.move(person)
        return house.told

    def ask(self, facts: list[str], rng: random.Random) -> list[Asked]:
        """Ask for everybody."""
        last = {fact.split()[0]: fact.rstrip(".").split()[-1] for fact in facts}
        return [Asked(f"Where is {person}?", last[person], f"{person} is in the") for person in PEOPLE]


class WhereIsWhat(ScatteredFacts):
    """Two supporting facts, or three."""

    family = "facts_things"
    questions_per_document = len(THINGS)
    introduction = "Somewhere in this text it is said where some people go and what they carry.\n\n"

    def __init__(self, num_supporting: int) -> None:
        self.name = f"facts_{num_supporting}"
        what = "where is a thing?" if num_supporting == 2 else "where was a thing before it came there?"
        self.about = f"people who carry things, among prose: {what} ({num_supporting} supporting facts)"
        self._num_supporting = num_supporting

    def make_facts(self, rng: random.Random) -> list[str]:
        """Let people carry each thing to two more places, and go on without it."""
        return self._house(rng).told

    def _house(self, rng: random.Random) -> House:
        house = House(rng)
        for thing, person in zip(THINGS, rng.sample(PEOPLE, len(THINGS)), strict=True):
            house.move(person)
            house.take(person, thing)
            house.move(person)
            house.move(person)
            if rng.random() < 0.5:
                house.drop(thing)
                house.move(person)
        return house

    def ask(self, facts: list[str], rng: random.Random) -> list[Asked]:
        """Ask for every thing."""
        been = _things_places(facts)
        if self._num_supporting == 2:
            return [Asked(f"Where is the {thing}?", been[thing][-1], f"The {thing} is in the") for thing in THINGS]
        return [
            Asked(
                f"Where was the {thing} before the {been[thing][-1]}?",
                been[thing][-2],
                f"Before the {been[thing][-1]} the {thing} was in the",
            )
            for thing in THINGS
        ]


def _things_places(facts: list[str]) -> dict[str, list[str]]:
    """Read from the sentences in which places each thing was, in order."""
    where: dict[str, str] = {}
    holder: dict[str, str] = {}
    been: dict[str, list[str]] = {}
    for fact in facts:
        words = fact.rstrip(".").split()
        person = words[0]
        if words[1] == "took":
            holder[words[3]] = person
            been.setdefault(words[3], []).append(where[person])
        elif words[1] == "put":
            del holder[words[3]]
        else:
            where[person] = words[-1]
            for thing in [thing for thing, who in holder.items() if who == person]:
                been[thing].append(words[-1])
    return been


class Hops(ScatteredFacts):
    """A chain of keepers, told in any order."""

    family = "hops"
    questions_per_document = 4
    num_names = 12
    introduction = "Somewhere in this text it is said who the keeper of whom is.\n\n"

    def __init__(self, num_hops: int) -> None:
        self.name = f"hops_{num_hops}"
        self.about = f"a chain of names, among prose, to follow over {num_hops} {'step' if num_hops == 1 else 'steps'}"
        self.num_hops = num_hops

    def make_facts(self, rng: random.Random) -> list[str]:
        """Make a ring of names, told in random order."""
        ring = new_names(rng, self.num_names)
        facts = [f"The keeper of {name} is {after}." for name, after in zip(ring, ring[1:] + ring[:1], strict=True)]
        rng.shuffle(facts)
        return facts

    def ask(self, facts: list[str], rng: random.Random) -> list[Asked]:
        """Ask from several names on."""
        keeper = {fact.split()[3]: fact.rstrip(".").split()[-1] for fact in facts}
        asked = []
        for start in rng.sample(sorted(keeper), self.questions_per_document):
            end, what = start, start
            for _ in range(self.num_hops):
                end, what = keeper[end], f"the keeper of {what}"
            asked.append(Asked(f"Who is {what}?", end, f"T{what[1:]} is"))
        return asked


REASONING_TASKS = [WhereIsWho(), WhereIsWhat(2), WhereIsWhat(3), *(Hops(n) for n in (1, 2, 3, 4))]
