"""Which prefix of a prompt is cached: one position for all groups, and the reasons where it is short."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from hybrid_engine.explanation import CacheExplanation, explain
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoints import Checkpoint, CheckpointIndex
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.request import Request


@dataclass(frozen=True, slots=True)
class CacheHit:
    """The longest prefix of a prompt at which every group can go on."""

    num_computed_tokens: int
    shared_prefix_boundary: int | None
    """Where the groups that keep everything still match though another can't go on there; None: not beyond the hit."""
    group_reach: tuple[int, ...]
    """Tokens that each group alone could offer; a window's, at or below the reach of those that keep everything."""
    checkpoint: Checkpoint | None = None
    """Set when the hit ends inside a block: its partly filled blocks are to be copied."""


class PrefixLookup:
    """Reads what the groups have cached; changes nothing."""

    def __init__(
        self,
        managers: Sequence[GroupManager],
        checkpoints: CheckpointIndex,
        *,
        match_unit_tokens: int,
        alignment_tokens: int,
    ) -> None:
        """Hashes exist at multiples of match_unit_tokens; blocks of all groups end at multiples of alignment_tokens."""
        self.match_unit_tokens = match_unit_tokens
        self.alignment_tokens = alignment_tokens
        self._managers = managers
        self._checkpoints = checkpoints
        self._keepers = tuple(i for i, manager in enumerate(managers) if manager.keeps_everything)
        self._forgetters = tuple(i for i, manager in enumerate(managers) if not manager.keeps_everything)

    def find_longest_cache_hit(self, request: Request, *, max_tokens: int | None = None) -> CacheHit:
        """Return the longest hit: the largest position, at most max_tokens, at which every group can go on.

        max_tokens: by default all known tokens but the last, which is always computed, for its logits; fewer where
        the request wants log-probabilities of its prompt. Positions are those at which blocks of all groups end, and
        the checkpoints recorded inside blocks. Only lengths are looked up; `collect_hit` lists the blocks.
        """
        hashes = request.block_hashes
        max_tokens = request.max_hit_tokens if max_tokens is None else max_tokens
        whole = len(hashes) * self.match_unit_tokens
        reach = [whole] * len(self._managers)
        for i in self._keepers:
            reach[i] = self._managers[i].longest_hit(hashes, whole)
        kept = min((reach[i] for i in self._keepers), default=whole)
        for i in self._forgetters:
            reach[i] = self._managers[i].longest_hit(hashes, min(kept, max_tokens))
        aligned = self._longest_aligned(hashes, min(*reach, max_tokens))
        checkpoint = self._longest_checkpoint(request, reach, aligned, max_tokens)
        hit = checkpoint.position if checkpoint else aligned
        boundary = min(kept, max_tokens) // self.match_unit_tokens * self.match_unit_tokens
        has_boundary = self._keepers and boundary > hit
        return CacheHit(hit, boundary if has_boundary else None, tuple(reach), checkpoint)

    def _longest_aligned(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Lower a position until every group that forgets can go on there; the others reach at least max_tokens."""
        hit = self.align(max_tokens)
        is_agreed = False
        while not is_agreed:
            is_agreed = True
            for i in self._forgetters:
                reached = self.align(self._managers[i].longest_hit(block_hashes, hit))
                if reached < hit:
                    hit, is_agreed = reached, False
        return hit

    def _longest_checkpoint(
        self, request: Request, reach: Sequence[int], aligned: int, max_tokens: int, *, needs_windows: bool = True
    ) -> Checkpoint | None:
        """Return the longest recorded checkpoint beyond aligned at which every group can go on."""
        unit = self.match_unit_tokens
        top = min([max_tokens, *(reach[i] + self._managers[i].block_size - 1 for i in self._keepers)])
        for num_units in range(top // unit, aligned // unit - 1, -1):
            parent = request.hash_at(num_units)
            if not self._checkpoints.has(parent):
                continue
            start = num_units * unit
            tail = request.token_ids[start : min(start + unit - 1, top)]
            for checkpoint in self._checkpoints.find(parent, tail):
                # A stored one comes from a file that says itself where it lies: a wrong position is no hit.
                is_beyond = aligned < checkpoint.position == start + len(checkpoint.tail)
                if is_beyond and self._can_resume(checkpoint, request, reach, needs_windows):
                    return checkpoint
        return None

    def _can_resume(self, checkpoint: Checkpoint, request: Request, reach: Sequence[int], needs_windows: bool) -> bool:
        """Return whether the full blocks that every group needs at a checkpoint are cached; it keeps the others."""
        position = checkpoint.position
        return all(
            manager.floor_to_block(position) <= reach[i]
            if manager.keeps_everything
            else not needs_windows or manager.has_needed_blocks(request.block_hashes, position)
            for i, manager in enumerate(self._managers)
        )

    def collect_hit(
        self, request: Request, *, max_tokens: int | None = None
    ) -> tuple[CacheHit, tuple[list[Block], ...]]:
        """Find the longest hit and list its full blocks by group.

        A block that turns out to be missing below the length found (no eviction of ours leaves such a hole) shortens
        the hit.
        """
        while True:
            hit = self.find_longest_cache_hit(request, max_tokens=max_tokens)
            tables: list[list[Block]] = []
            for manager in self._managers:
                table = manager.collect(request.block_hashes, hit.num_computed_tokens)
                if isinstance(table, int):
                    max_tokens = (table + 1) * manager.block_size - 1
                    break
                tables.append(table)
            else:
                return hit, tuple(tables)

    def collect_for_external(self, request: Request, num_local_tokens: int, end_tokens: int) -> list[list[Block]]:
        """List the cached blocks of a hit that a connector extends to end_tokens: what is needed there, by group."""
        tables: list[list[Block]] = []
        for manager in self._managers:
            num_blocks = num_local_tokens // manager.block_size
            num_null = min(manager.first_needed_block(end_tokens), num_blocks)
            keys = [manager.key(request.block_hashes, i) for i in range(num_null, num_blocks)]
            tables.append([manager.pool.null_block] * num_null + [manager.pool.cached[key] for key in keys])
        return tables

    def explain(self, request: Request, hit: CacheHit) -> CacheExplanation:
        """Say why a request's hit is as long as it is; to be asked before anything else changes the cache."""
        num_tokens = request.num_tokens
        hashes = request.block_hashes
        reach = hit.group_reach
        seen = {i: self._managers[i].known_end(hashes, reach[i]) for i in self._keepers}
        if not seen:
            # No group keeps everything: nothing but keys and checkpoints tells how far the prompt was known.
            known = self._known_end(request, max(manager.known_end(hashes, 0) for manager in self._managers))
            resumable = kept = known
        else:
            known = self._known_end(request, max(seen.values()))
            kept = min([*(reach[i] for i in self._keepers if seen[i] > reach[i]), known])
            resumable = self.align(min(min(reach[i] for i in self._keepers), request.max_hit_tokens))
        return explain(
            num_tokens=num_tokens,
            hit=hit.num_computed_tokens,
            with_state=self._longest_with_state(request, reach, resumable),
            resumable=resumable,
            kept=kept,
            seen=known,
        )

    def _longest_with_state(self, request: Request, reach: Sequence[int], resumable: int) -> int:
        """Return the last position at which all but the window groups could go on."""
        if not any(manager.is_state for manager in self._managers):
            return resumable
        found = self._longest_checkpoint(request, reach, 0, request.max_hit_tokens, needs_windows=False)
        return found.position if found else 0

    def _known_end(self, request: Request, known: int) -> int:
        """Extend what is known of a prompt by the longest recorded checkpoint behind its last known match unit."""
        unit = self.match_unit_tokens
        # Only a state group's checkpoints can lie beyond what the token groups know.
        last = known // unit if self._keepers else len(request.block_hashes)
        for num_units in range(last, known // unit - 1, -1):
            tail = request.token_ids[num_units * unit : (num_units + 1) * unit - 1]
            longest = next(self._checkpoints.find(request.hash_at(num_units), tail), None)
            if longest is not None:
                return max(longest.position, known)
        return known

    def shared_tokens(self, request: Request, other: Request) -> int:
        """Return the last aligned position of both prompts up to which they are equal and a hit of request may
        reach."""
        ours, theirs = request.block_hashes, other.block_hashes
        longest = min(request.max_hit_tokens, other.num_prompt_tokens) // self.match_unit_tokens
        # A hash stands for the whole prefix, so that they are equal up to a point and different from there on.
        num_equal = bisect_left(range(longest), True, key=lambda i: ours[i] != theirs[i])
        return self.align(num_equal * self.match_unit_tokens)

    def tokens_of_load(self, request: Request, other: Request, end_tokens: int) -> int:
        """Return up to where a request can go on, once a load of another one has brought it to end_tokens.

        Windows and states arrive as they are at the end; of groups that keep everything the beginning is as good.
        """
        shared = self.shared_tokens(request, other)
        # A load may end inside a block, of which there is no hash.
        rest = slice(shared, end_tokens)
        is_near = end_tokens <= min(shared + self.alignment_tokens, request.max_hit_tokens)
        if is_near and request.token_ids[rest] == other.token_ids[rest]:
            return end_tokens
        return 0 if self._forgetters else min(shared, end_tokens)

    def align(self, num_tokens: int) -> int:
        """Return the last position at or below num_tokens at which blocks of all token groups end."""
        return num_tokens // self.alignment_tokens * self.alignment_tokens
