"""Short articles about towns and people that don't exist, and questions on them: what qa tasks use by default.

Made from sentences of our own and invented names, so that no model can know an answer and no licence binds them.
"""

from __future__ import annotations

import random
from functools import cache

from hybrid_engine.evals.words import new_names

NUM_TOWNS = 600
TRADES = (
    "a weaver",
    "a clockmaker",
    "a ferryman",
    "a botanist",
    "a bell founder",
    "a teacher",
    "a cartographer",
    "a brewer",
)
GOODS = ("blue glass", "smoked trout", "walnut chairs", "copper kettles", "paper lanterns", "woollen hats", "slate")
FEASTS = ("the lanterns", "the ferry", "the first snow", "the swallows", "the long table", "the seven bells")
TERRAINS = ("in a narrow valley", "on a low hill", "between two lakes", "at the edge of a moor", "under a steep cliff")

Asked = tuple[str, str, tuple[int, ...]]
"""A question, its answer, the articles that it needs."""


@cache
def made_up_articles(*, num_hops: int) -> tuple[list[str], list[Asked]]:
    """Return the articles, and one question for each town, in one fixed order. num_hops: 1 or 2."""
    assert num_hops in (1, 2), num_hops
    rng = random.Random("made-up articles")
    names = new_names(rng, 3 * NUM_TOWNS)
    towns, founders, rivers = (names[i * NUM_TOWNS : (i + 1) * NUM_TOWNS] for i in range(3))
    articles: list[str] = []
    asked: list[Asked] = []
    for town, founder, river in zip(towns, founders, rivers, strict=True):
        year, goods, feast, heads = rng.randint(1100, 1899), rng.choice(GOODS), rng.choice(FEASTS), rng.randint(3, 90)
        articles.append(
            f"{town} is a town of about {heads},{rng.randint(100, 999)} people {rng.choice(TERRAINS)}. It was founded "
            f"in {year} by {founder}, who is buried under the floor of its church. The river {river} runs through it "
            f"and drives three mills. The town is known for its {goods}, which are sold as far as the coast, and for "
            f"the feast of {feast}, which lasts four days."
        )
        articles.append(
            f"{founder} was {rng.choice(TRADES)} before the age of {rng.randint(20, 40)}, and is remembered for a "
            f"journey on foot through the whole country. A portrait of {founder} hangs in the town hall; it shows a "
            f"stern face, a broad hat and, for no reason that anybody knows, a goose."
        )
        home, person = len(articles) - 2, len(articles) - 1
        one_hop = (
            (f"In which year was {town} founded?", str(year)),
            (f"Who founded {town}?", founder),
            (f"Which river runs through {town}?", river),
        )
        if num_hops == 1:
            question, answer = rng.choice(one_hop)
            asked.append((question, answer, (home,)))
        else:
            asked.append((f"Which river runs through the town that {founder} founded?", river, (home, person)))
    return articles, asked
