"""The radix tree of checkpoints, against an exhaustive look at all of them."""

import random

import pytest

from hybrid_engine.groups.checkpoint_tree import CheckpointTree, Path
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.hashing import BlockHasher

UNIT = 4
HASHER = BlockHasher(UNIT, key=b"k" * 16)
ROOT = HASHER.root()


def path_of(tokens: list[int]) -> Path:
    hashes = []
    HASHER.extend(hashes, ROOT, tokens)
    return Path(ROOT, hashes, tokens)


def add(tree: CheckpointTree, tokens: list[int], path: Path | None = None) -> Checkpoint:
    """Record the end of some tokens, which a path begins with."""
    path, count = path or path_of(tokens), len(tokens) // UNIT
    parent = path.hashes[count - 1] if count else ROOT
    checkpoint = Checkpoint(len(tokens), parent, tuple(tokens[count * UNIT :]), ())
    tree.add(checkpoint, path)
    return checkpoint


class Exhaustive:
    """All checkpoints with their tokens, nothing clever."""

    def __init__(self) -> None:
        self.tokens: dict[Checkpoint, list[int]] = {}

    def ancestor(self, checkpoint: Checkpoint) -> Checkpoint | None:
        mine = self.tokens[checkpoint]
        shorter = [each for each, its in self.tokens.items() if len(its) < len(mine) and mine[: len(its)] == its]
        return max(shorter, key=lambda each: each.position, default=None)

    def is_passed(self, checkpoint: Checkpoint) -> bool:
        mine = self.tokens[checkpoint]
        return any(len(its) > len(mine) and its[: len(mine)] == mine for its in self.tokens.values())

    def own_units(self, checkpoint: Checkpoint) -> int:
        mine = self.tokens[checkpoint]
        shared = 0
        for other, its in self.tokens.items():
            if other is not checkpoint:
                equal = next((i for i, (a, b) in enumerate(zip(mine, its, strict=False)) if a != b), None)
                shared = max(shared, (min(len(mine), len(its)) if equal is None else equal) // UNIT)
        return max(0, len(mine) // UNIT - shared)


@pytest.mark.parametrize("seed", range(20))
def test_it_agrees_with_an_exhaustive_look_after_any_changes(seed):
    rng, tree, all_of_them = random.Random(seed), CheckpointTree(UNIT), Exhaustive()
    for _ in range(120):
        if all_of_them.tokens and rng.random() < 0.4:
            gone = rng.choice(list(all_of_them.tokens))
            tree.remove(gone)
            del all_of_them.tokens[gone]
        else:
            whole = [rng.randrange(2) if i % 5 == 0 else 7 for i in range(rng.randrange(1, 30))]
            tokens = whole[: rng.randrange(1, len(whole) + 1)]
            if tokens not in all_of_them.tokens.values():
                all_of_them.tokens[add(tree, tokens, path_of(whole))] = tokens
        for checkpoint in all_of_them.tokens:
            assert tree.ancestor(checkpoint) is all_of_them.ancestor(checkpoint)
            assert tree.is_passed(checkpoint) == all_of_them.is_passed(checkpoint)
            assert tree.own_units(checkpoint) == all_of_them.own_units(checkpoint)


def test_nothing_is_left_when_all_checkpoints_have_gone():
    tree = CheckpointTree(UNIT)
    checkpoints = [add(tree, [1] * 8 + [i] * 9) for i in range(5)]
    assert tree.num_nodes == 1 + 1 + 5  # the root, where they part, and each end
    for checkpoint in checkpoints:
        tree.remove(checkpoint)
    assert tree.num_nodes == 0


def test_ways_on_are_counted_where_paths_part():
    tree = CheckpointTree(UNIT)
    stem = [1] * 10
    system = add(tree, stem)
    assert not tree.is_passed(system)
    for i in range(3):
        add(tree, [*stem, i, i, i])
    assert len(list(tree.ways_on(system))) == 3
