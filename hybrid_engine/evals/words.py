"""Words that nobody has seen: what a model says of them it must have read in its prompt."""

from __future__ import annotations

import random

ONSETS = (*"bcdfghjklmnprstvwz", "br", "cr", "dr", "fl", "gr", "pl", "sh", "st", "th", "tr")
VOWELS = "aeiou"
CODAS = "bdgklmnprstx"


def new_names(rng: random.Random, count: int) -> list[str]:
    """Return so many invented names, none twice."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[new_word(rng, rng.randint(2, 3)).capitalize()] = None
    return list(found)


def new_word(rng: random.Random, num_syllables: int) -> str:
    """Return one invented word."""
    syllables = [rng.choice(ONSETS) + rng.choice(VOWELS) for _ in range(num_syllables)]
    return "".join(syllables) + (rng.choice(CODAS) if rng.random() < 0.4 else "")
