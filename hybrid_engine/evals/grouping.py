"""The order in which prompts are sent, and where recurrent layers leave states, so that nothing is computed twice."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hybrid_engine.scoring import num_common_tokens


def shared_order(prompts: Sequence[Sequence[int]]) -> list[int]:
    """Return the order in which prompts that share the longest prefixes stand together: that of their tokens.

    It walks the tree of their prefixes branch by branch.
    """
    return sorted(range(len(prompts)), key=lambda i: list(prompts[i]))


def junctions(prompts: Sequence[Sequence[int]], caps: Sequence[int]) -> list[list[int]]:
    """Return for each prompt, in shared order, the positions at which a later one parts from it, ascending.

    caps: the most tokens of each prompt that may come from the cache; who goes on needs a state there or before.
    """
    common = [num_common_tokens(one, other) for one, other in pairwise(prompts)]
    found: list[list[int]] = []
    for i in range(len(prompts)):
        shared, positions = len(prompts[i]), set()
        for j in range(i + 1, len(prompts)):
            shared = min(shared, common[j - 1])
            if shared == 0:
                break
            positions.add(min(shared, caps[j]))
        found.append(sorted(positions))
    return found


def num_unique_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the tokens of the prompts, in shared order, each shared prefix counted once."""
    repeated = sum(num_common_tokens(one, other) for one, other in pairwise(prompts))
    return sum(map(len, prompts)) - repeated
