"""Conversations of agents, replayed turn by turn: what is hit, beside the most that exact prefixes could give."""

import random

import pytest
from bookkeeping import Bench, full, sliding, state

GROUPS = {
    "full": [full()],
    "full and state": [full(), state()],
    "three kinds": [full(16), sliding(64, 32), state()],
}


class PrefixTree:
    """Every token sequence seen; knows how long a prefix of a new one it has."""

    def __init__(self):
        self.root = {}

    def longest(self, token_ids) -> int:
        node, length = self.root, 0
        while length < len(token_ids) and token_ids[length] in node:
            node, length = node[token_ids[length]], length + 1
        return length

    def add(self, token_ids) -> None:
        node = self.root
        for token in token_ids:
            node = node.setdefault(token, {})


def replay(specs, *, edits_answers: bool) -> float:
    """Run 6 conversations of 6 turns that take turns; return the tokens hit as a share of the bound."""
    rng = random.Random(0)
    bench = Bench(specs, [2000, 2000, 400][: len(specs)], checkpoint_interval=0, max_num_scheduled_tokens=4096)
    tree, hit, bound = PrefixTree(), 0, 0
    histories = [[list(range(1000, 1400))] for _ in range(6)]  # one system prompt for all
    for turn in range(6):
        for agent, messages in enumerate(histories):
            messages.append([rng.randrange(50, 1000) for _ in range(rng.randrange(20, 90))])
            prompt = [token for message in messages for token in message]
            ends = [sum(map(len, messages[: k + 1])) for k in range(len(messages))]
            bound += min(tree.longest(prompt), len(prompt) - 1)
            request = bench.add(prompt, f"{agent}.{turn}", max_tokens=rng.randrange(10, 60), message_boundaries=ends)
            bench.run()
            hit += request.cache.hit
            tree.add(request.token_ids[:-1])
            answer = request.output_token_ids
            messages.append(answer[len(answer) // 2 :] if edits_answers else answer)
    return hit / bound


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_a_conversation_hits_nearly_all_that_it_shares_with_its_past(specs):
    assert replay(specs, edits_answers=False) >= 0.99


@pytest.mark.parametrize("specs", GROUPS.values(), ids=GROUPS)
def test_a_conversation_whose_answers_are_cut_in_the_history_hits_nearly_as_much(specs):
    assert replay(specs, edits_answers=True) >= 0.95
