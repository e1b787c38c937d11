"""Which recorded checkpoints lie on the way to which: a radix tree over the hashes of match units.

A node stands where the match units of a checkpoint end, and where paths part (Morrison 1968, "PATRICIA"). Checkpoints
that differ only in the few tokens behind their last match unit share a node. A node without a checkpoint has two
children or more, so that there are fewer than two nodes for each checkpoint.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hybrid_engine.groups.hashing import BlockHash

if TYPE_CHECKING:
    from hybrid_engine.groups.checkpoints import Checkpoint


@dataclass(frozen=True, slots=True)
class Path:
    """The tokens of a request and the hashes of their match units; both may still grow."""

    root: BlockHash
    """What the chain of hashes begins with."""
    hashes: Sequence[BlockHash]
    token_ids: Sequence[int]


class Node:
    """A place on the paths of one or more checkpoints."""

    __slots__ = ("above", "checkpoints", "children", "num_units", "path")

    def __init__(self, above: Node | None, num_units: int, path: Path) -> None:
        """path: any of those that lead here."""
        self.above = above
        self.num_units = num_units
        self.path = path
        self.children: dict[BlockHash, Node] = {}
        """By the hash of the first match unit behind this one."""
        self.checkpoints: list[Checkpoint] = []


class CheckpointTree:
    """The recorded checkpoints by what they share."""

    def __init__(self, match_unit_tokens: int) -> None:
        self.match_unit_tokens = match_unit_tokens
        self._nodes: dict[BlockHash, Node] = {}
        """By their last match unit's hash, roots by what their chain of hashes begins with."""
        self._node_of: dict[Checkpoint, Node] = {}

    @property
    def num_nodes(self) -> int:
        """Places on paths, roots among them."""
        return len(self._nodes)

    # What it tells

    def ancestor(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return the longest other checkpoint on the way to one; None: there is none."""
        node = self._node_of[checkpoint]
        tokens: tuple[int, ...] = checkpoint.tail
        best = _longest(node.checkpoints, tokens, but=checkpoint)
        while best is None and node.above is not None:
            child, node = node, node.above
            if node.checkpoints:
                num_tokens = max(len(each.tail) for each in node.checkpoints)
                best = _longest(node.checkpoints, self._tokens_behind(node, child, num_tokens))
        return best

    def ways_on(self, checkpoint: Checkpoint) -> Iterator[Node | Checkpoint]:
        """Iterate over what lies right behind a checkpoint: nodes, and checkpoints inside the same match unit."""
        node, tail = self._node_of[checkpoint], checkpoint.tail
        for other in node.checkpoints:
            if len(other.tail) > len(tail) and other.tail[: len(tail)] == tail:
                yield other
        for child in node.children.values():
            if not tail or self._tokens_behind(node, child, len(tail)) == tail:
                yield child

    def is_passed(self, checkpoint: Checkpoint) -> bool:
        """Return whether another checkpoint lies behind one."""
        return next(self.ways_on(checkpoint), None) is not None

    def own_units(self, checkpoint: Checkpoint) -> int:
        """Return how many match units at a checkpoint's end lie on the way to no other."""
        node = self._node_of[checkpoint]
        if node.above is None or node.children or len(node.checkpoints) > 1:
            return 0
        return node.num_units - node.above.num_units

    # What changes it

    def add(self, checkpoint: Checkpoint, path: Path) -> None:
        """Take a checkpoint in. path: its request's, at least up to it."""
        num_units = checkpoint.position // self.match_unit_tokens
        node = self._nearest(num_units, path)
        if node.num_units < num_units:
            node = self._extend(node, num_units, path)
        node.checkpoints.append(checkpoint)
        self._node_of[checkpoint] = node

    def remove(self, checkpoint: Checkpoint) -> None:
        """Take a checkpoint out, and the nodes that nothing needs any more."""
        node = self._node_of.pop(checkpoint)
        node.checkpoints.remove(checkpoint)
        while not node.checkpoints and len(node.children) < 2 and node.above is not None:
            above = node.above
            first = node.path.hashes[above.num_units]
            del self._nodes[node.path.hashes[node.num_units - 1]]
            if node.children:
                (child,) = node.children.values()
                child.above, above.children[first] = above, child
                return
            del above.children[first]
            node = above
        if node.above is None and not node.checkpoints and not node.children:
            del self._nodes[node.path.root]

    def _nearest(self, num_units: int, path: Path) -> Node:
        """Return the last node on a path of num_units."""
        for count in range(num_units, 0, -1):
            node = self._nodes.get(path.hashes[count - 1])
            if node is not None:
                return node
        if path.root not in self._nodes:
            self._nodes[path.root] = Node(None, 0, path)
        return self._nodes[path.root]

    def _extend(self, node: Node, num_units: int, path: Path) -> Node:
        """Make a node at num_units, behind the last one on the way there."""
        child = node.children.get(path.hashes[node.num_units])
        if child is None:
            return self._put(node, num_units, path)
        # It is no node on this way: the two part before it, or it lies further on.
        ours, theirs, end = path.hashes, child.path.hashes, min(num_units, child.num_units)
        num_shared = bisect_left(range(end), True, lo=node.num_units + 1, key=lambda i: ours[i] != theirs[i])
        between = self._put(node, num_shared, child.path)
        child.above, between.children[theirs[num_shared]] = between, child
        return between if num_shared == num_units else self._put(between, num_units, path)

    def _put(self, above: Node, num_units: int, path: Path) -> Node:
        node = Node(above, num_units, path)
        above.children[path.hashes[above.num_units]] = node
        self._nodes[path.hashes[num_units - 1]] = node
        return node

    def _tokens_behind(self, node: Node, child: Node, num_tokens: int) -> tuple[int, ...]:
        """Return the first tokens, fewer than a match unit's, on the way from a node to one of its children."""
        start = node.num_units * self.match_unit_tokens
        return tuple(child.path.token_ids[start : start + num_tokens]) if num_tokens else ()


def _longest(
    checkpoints: Sequence[Checkpoint], tokens: tuple[int, ...], *, but: Checkpoint | None = None
) -> Checkpoint | None:
    """Return the checkpoint with the longest tail that begins tokens."""
    found = [each for each in checkpoints if each is not but and each.tail == tokens[: len(each.tail)]]
    return max(found, key=lambda each: len(each.tail), default=None)
