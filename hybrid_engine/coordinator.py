"""One answer for all groups: which prefix is cached, and which blocks a request gets.

A prefix can be resumed at token p if and only if every group can resume at p. Block tables of one request:

    [0, skipped)           null blocks: the group needs nothing there any more
    [skipped, hit)         shared: other requests may read these blocks, nobody writes them
    [hit, computed)        ours: written; findable once a block is full and its step has finished
    [computed, wanted)     ours: allocated, unwritten
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hybrid_engine.checkpoint_recorder import CheckpointRecorder
from hybrid_engine.config import CacheConfig
from hybrid_engine.errors import CapacityError, PromptTooLongError
from hybrid_engine.eviction.policies import make_policy
from hybrid_engine.explanation import CacheExplanation, explain_disabled
from hybrid_engine.groups.arena import Arena
from hybrid_engine.groups.base import NEVER, GroupManager, ceil_div
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoint_facts import CheckpointFacts
from hybrid_engine.groups.checkpoints import CheckpointIndex
from hybrid_engine.groups.eviction import EvictionPolicy
from hybrid_engine.groups.hashing import BlockHasher
from hybrid_engine.groups.layout import MemoryLayout, split_memory
from hybrid_engine.groups.managers import make_manager
from hybrid_engine.groups.memory import CacheMemory
from hybrid_engine.groups.spec import ENDLESS, Group
from hybrid_engine.pins import Pins
from hybrid_engine.prefix_lookup import CacheHit, PrefixLookup
from hybrid_engine.request import HeldBlocks, Request

NO_HIT_BLOCKS: tuple[list[Block], ...] = ()


class Coordinator:
    """Finds hits and hands out blocks over all groups; either every group gives or none does."""

    def __init__(
        self,
        groups: Sequence[Group],
        memory: MemoryLayout | Sequence[int],
        *,
        config: CacheConfig | None = None,
        policy: EvictionPolicy | None = None,
    ) -> None:
        """memory: where blocks can lie; or how many usable ones each group has, the null block not counted.

        policy: which checkpoint goes when memory is short, where layers are recurrent; None: the one that config names.
        Raises CapacityError when the memory can't hold what a single token needs.
        """
        self.config = config or CacheConfig()
        self.groups = tuple(groups)
        # A state has no block ends; where all groups are states, prefixes are still hashed at every block_size tokens.
        sizes = [group.block_size for group in self.groups if group.block_size != ENDLESS] or [self.config.block_size]
        self.match_unit_tokens = math.gcd(*sizes)
        self.alignment_tokens = math.lcm(*sizes)
        self.hasher = BlockHasher(self.match_unit_tokens, key=self.config.hash_key)
        layout = memory if isinstance(memory, MemoryLayout) else split_memory(self.groups, memory)
        self.memory = CacheMemory(layout, max_evicted_keys=self.config.max_evicted_keys)
        self.managers: tuple[GroupManager, ...] = tuple(
            make_manager(group.spec, pool, match_unit_tokens=self.match_unit_tokens)
            for group, pool in zip(self.groups, self.memory.pools, strict=True)
        )
        self._forgetters = tuple(i for i, manager in enumerate(self.managers) if not manager.keeps_everything)
        self.last_shortage: tuple[Arena, int] | None = None
        """Where the last allocation that was refused lacked room, and how many extents of it."""
        self._check_capacity()
        self.capacity_tokens = self._find_capacity()
        """Most tokens of one request whose cache entries fit when nothing else runs; NEVER when there is no limit."""
        self._states = tuple(i for i, manager in enumerate(self.managers) if manager.is_state)
        self.checkpoints = CheckpointIndex(
            [manager.pool for manager in self.managers],
            CheckpointFacts(self.groups, self.match_unit_tokens),
            policy=policy or make_policy(self.config.eviction_policy)
            if self._states and self.config.enable_prefix_caching
            else None,
        )
        self.pins = Pins(self.managers, self.memory, self.checkpoints)
        self.lookup = PrefixLookup(
            self.managers,
            self.checkpoints,
            match_unit_tokens=self.match_unit_tokens,
            alignment_tokens=self.alignment_tokens,
        )
        self.recorder = CheckpointRecorder(
            self.groups, self.managers, self.lookup, self.checkpoints, self.config, copy=self.memory.copy
        )

    # Capacity

    def check_prompt(self, num_prompt_tokens: int) -> None:
        """Raise PromptTooLongError when a prompt can't fit even alone."""
        capacity = self.capacity_tokens
        if num_prompt_tokens > capacity:
            raise PromptTooLongError(
                f"the prompt has {num_prompt_tokens:,} tokens, the cache memory ({self.memory.describe()}) "
                f"holds {capacity:,} of one request: shorten the prompt or give the cache more memory"
            )

    def _find_capacity(self) -> int:
        """Find the longest request that fits alone, computed token by token: windows then hold least."""
        if self._fits(NEVER):
            return NEVER
        low, high = 0, 1
        while self._fits(high):
            low, high = high, 2 * high
        return bisect_left(range(high), True, lo=low, key=lambda num_tokens: not self._fits(num_tokens + 1))

    def _fits(self, num_tokens: int) -> bool:
        peaks = [manager.num_peak_blocks(num_tokens, chunk_tokens=1) for manager in self.managers]
        return self.memory.find_shortage(peaks) is None

    def _check_capacity(self) -> None:
        for group, manager in zip(self.groups, self.managers, strict=True):
            if manager.pool.num_blocks < 1:
                raise CapacityError(
                    f"group {group.group_id} ({group.spec.kind}, layers {group.layer_indices[0]}…) has 0 blocks of "
                    f"{group.block_bytes:,} bytes, must have at least 1: give the cache more memory"
                )

    # Hits

    def look_up(self, request: Request) -> tuple[CacheHit, tuple[list[Block], ...]]:
        """Return what a waiting request can take from the cache: all known tokens but the last, or less."""
        if not self.may_read(request):
            return CacheHit(0, None, (0,) * len(self.managers)), NO_HIT_BLOCKS
        return self.lookup.collect_hit(request)

    def explain(self, request: Request, hit: CacheHit) -> CacheExplanation:
        """Say why a request's hit is as long as it is; to be asked before anything else changes the cache."""
        if not self.may_read(request):
            return explain_disabled(request.num_tokens)
        return self.lookup.explain(request, hit)

    def may_read(self, request: Request) -> bool:
        """Return whether a request may take anything from the cache."""
        return self.config.enable_prefix_caching and request.reads_prefix_cache

    # Allocation

    def allocate_slots(
        self,
        request: Request,
        num_new_tokens: int,
        *,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: Sequence[Sequence[Block]] = NO_HIT_BLOCKS,
        partial_blocks: Sequence[Block | None] = (),
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        full_sequence_must_fit: bool = False,
        chunk_tokens: int | None = None,
        num_draft_slots: int = 0,
        reserved_blocks: int | Sequence[int] = 0,
        watermark: float = 0.0,
    ) -> bool:
        """Give a request the blocks for its next tokens in every group, or change nothing and return False.

        | computed, in flight | new_computed        | external               | new             | lookahead  |
        |---------------------|---------------------|------------------------|-----------------|------------|
        | held before         | a hit just found    | brought by a connector | computed now    | for drafts |

        num_new_computed_tokens, new_computed_blocks, partial_blocks: a hit, its full blocks by group, and the partly
            filled ones that will be copied to the first new block, for a request that holds nothing.
        num_external_computed_tokens: tokens after the hit whose cache entries a connector writes.
        delay_cache_blocks: don't make the external tokens findable now; `cache_blocks` does when they have arrived.
        full_sequence_must_fit: admit only if all known tokens and one more block fit in each group, when computed
            chunk_tokens at a time (None: at once), and a state for each of num_draft_slots.
        reserved_blocks, watermark: blocks, of each group or by group, and a share of the memory, to leave free.
        Raises ValueError when there is nothing to allocate.
        """
        if num_new_tokens + num_new_computed_tokens + num_external_computed_tokens <= 0:
            raise ValueError(f"request {request.request_id}: no new, cached or external tokens: nothing to allocate")
        held = request.held or HeldBlocks(len(self.managers))
        num_computed = request.num_computed_tokens + num_new_computed_tokens + num_external_computed_tokens
        num_slots = num_computed + request.num_in_flight_tokens + num_new_tokens + num_lookahead_tokens
        self._release_passed(request, held)
        num_groups = len(self.managers)
        hits = new_computed_blocks or [()] * num_groups
        partials = partial_blocks or [None] * num_groups
        wanted = [
            manager.num_wanted_blocks(table, hit, num_computed, num_slots, num_lookahead_tokens)
            for manager, table, hit in zip(self.managers, held.tables, hits, strict=True)
        ]
        needed = wanted
        if full_sequence_must_fit:
            peaks = [
                _num_admission_blocks(manager, request, hit, num_slots, chunk_tokens)
                + (num_draft_slots if manager.is_state else 0)
                for manager, hit in zip(self.managers, hits, strict=True)
            ]
            needed = list(map(max, wanted, peaks))
        if reserved_blocks or watermark:
            reserved = [reserved_blocks] * num_groups if isinstance(reserved_blocks, int) else reserved_blocks
            needed = [count + reserved[i] + self.memory.margin_blocks(i, watermark) for i, count in enumerate(needed)]
        if self._is_short(needed, hits, partials):
            return False
        request.held = held
        self._take(held, hits, partials, wanted, num_computed)
        if num_external_computed_tokens and not delay_cache_blocks:
            self.cache_blocks(request, num_computed)
        return True

    def outstanding_blocks(self, requests: Iterable[Request], *, chunk_tokens: int) -> list[int]:
        """Return how many blocks of each group requests will yet take until all their known tokens are computed."""
        outstanding = [0] * len(self.managers)
        for request in requests:
            held, num_tokens = request.held, request.num_tokens
            if held is None or num_tokens - request.num_computed_tokens - request.num_in_flight_tokens <= 1:
                continue
            for i, manager in enumerate(self.managers):
                if not manager.is_state:
                    num_peak = manager.num_peak_blocks(num_tokens, chunk_tokens=chunk_tokens)
                    outstanding[i] += max(0, num_peak - len(held.tables[i]) + held.first_needed[i])
        return outstanding

    def _is_short(
        self,
        needed: Sequence[int],
        hits: Sequence[Sequence[Block]],
        partials: Sequence[Block | None],
    ) -> bool:
        """Return whether there is no room for so many blocks of each group beside a hit, and note where."""
        # Those of a hit that nobody holds are counted only where it can matter.
        if self.memory.has_at_hand([count + len(hit) + 1 for count, hit in zip(needed, hits, strict=True)]):
            return False
        self.last_shortage = self.memory.find_shortage(
            [
                count + manager.num_cached_blocks(hit, partial)
                for manager, count, hit, partial in zip(self.managers, needed, hits, partials, strict=True)
            ]
        )
        return self.last_shortage is not None

    def _take(
        self,
        held: HeldBlocks,
        hits: Sequence[Sequence[Block]],
        partials: Sequence[Block | None],
        wanted: Sequence[int],
        num_computed_tokens: int,
    ) -> None:
        # All hits first: no group's allocation may evict another's hit, nor a block that is still to be copied.
        for manager, table, hit, partial in zip(self.managers, held.tables, hits, partials, strict=True):
            manager.pin_hit(table, hit, partial)
        for i, manager in enumerate(self.managers):
            held.num_registered[i] = max(held.num_registered[i], len(hits[i]))
            held.first_needed[i] = max(held.first_needed[i], manager.first_needed_block(num_computed_tokens))
            manager.append_blocks(held.tables[i], wanted[i], num_computed_tokens)
        for manager, partial in zip(self.managers, partials, strict=True):
            if partial is not None:
                # Its copy is the first thing that the next step does, so that the block may be given out from here on.
                manager.pool.release((partial,))
        self._set_limits(held)

    def _set_limits(self, held: HeldBlocks) -> None:
        held.num_slots = min(
            len(table) * manager.block_size for table, manager in zip(held.tables, self.managers, strict=True)
        )
        held.release_position = min(
            (self.managers[i].release_position(held.first_needed[i]) for i in self._forgetters), default=NEVER
        )

    # What a step changes

    def cache_blocks(self, request: Request, num_computed_tokens: int) -> None:
        """Make the full blocks of a request's first num_computed_tokens findable; their bytes must be written."""
        held = request.held
        assert held is not None, f"request {request.request_id} holds no blocks"
        if not self.config.enable_prefix_caching:
            held.register_position = NEVER
            return
        for i, manager in enumerate(self.managers):
            held.num_registered[i] = manager.register_full_blocks(
                held.tables[i], request.block_hashes, held.num_registered[i], num_computed_tokens
            )
        held.register_position = (num_computed_tokens // self.match_unit_tokens + 1) * self.match_unit_tokens

    def note_step(self, starts: Sequence[int], counts: Sequence[int], seconds: float) -> None:
        """Learn how long tokens take from a step that computed counts[i] behind starts[i]; 0 seconds: not measured."""
        self.checkpoints.facts.cost.note_step(starts, counts, seconds)

    def free(self, request: Request) -> None:
        """Let go of all blocks of a request; what it has computed stays findable until the memory is needed."""
        held = request.held
        if held is None:
            return
        self.recorder.record_checkpoint(request)
        request.held = None
        for i, manager in enumerate(self.managers):
            manager.release_table(held.tables[i])
        self.recorder.unpin(held)
        if self.config.enable_prefix_caching and not self._states:
            self._keep_window_of(request, request.num_computed_tokens)

    def reset_prefix_cache(self) -> None:
        """Make nothing findable any more and unpin all; running requests keep what they hold."""
        self.pins.release_all()
        self.checkpoints.forget_all()
        for manager in self.managers:
            manager.pool.forget_all()

    def _release_passed(self, request: Request, held: HeldBlocks) -> None:
        num_computed = request.num_computed_tokens
        if num_computed < held.release_position or not held.tables[0]:
            return
        for i in self._forgetters:
            manager = self.managers[i]
            end = manager.first_needed_block(num_computed)
            kept = self._kept_blocks(manager, request)
            manager.release_range(held.tables[i], held.first_needed[i], end, kept)
            held.first_needed[i] = max(held.first_needed[i], end)
        self._set_limits(held)

    def _kept_blocks(self, manager: GroupManager, request: Request) -> list[range]:
        """Return the blocks below the prompt's end and the boundary: they outlive other passed blocks."""
        positions = [request.num_prompt_tokens]
        if request.shared_prefix_boundary is not None:
            positions.append(request.shared_prefix_boundary)
        return [
            # One token less, since the same prompt alone can use one position less (its last token is computed).
            range(manager.first_needed_block(self.lookup.align(position - 1)), ceil_div(position, manager.block_size))
            for position in positions
        ]

    def _keep_window_of(self, request: Request, position: int) -> None:
        """Keep what resuming at the last aligned position needs, though the running request had passed some of it."""
        position = self.lookup.align(position)
        for i in self._forgetters:
            manager = self.managers[i]
            end = min(position // manager.block_size, manager.num_keyed_blocks(request.block_hashes))
            for block_index in range(manager.first_needed_block(position), end):
                block = manager.pool.cached.get(manager.key(request.block_hashes, block_index))
                if block is not None and block.queue is not None:
                    manager.pool.keep_longer(block)

    # Facts for reports and tests

    @property
    def has_states(self) -> bool:
        """Whether some layers are recurrent."""
        return bool(self._states)

    def is_idle(self) -> bool:
        """Return whether nobody holds any block, but for those that are pinned."""
        return [manager.pool.num_held for manager in self.managers] == self.pins.num_blocks()

    def usage(self) -> tuple[GroupUsage, ...]:
        """Return how many blocks of each group are held, cached and empty."""
        return tuple(
            GroupUsage(
                group=group,
                num_blocks=manager.pool.num_owned,
                num_held=manager.pool.num_held,
                num_cached=len(manager.pool.free),
            )
            for group, manager in zip(self.groups, self.managers, strict=True)
        )


@dataclass(frozen=True, slots=True)
class GroupUsage:
    """Blocks of one group: held + cached + empty = num_blocks."""

    group: Group
    num_blocks: int
    """In the memory that the group has now."""
    num_held: int
    """By running requests."""
    num_cached: int
    """Held by nobody, but findable."""

    @property
    def num_empty(self) -> int:
        """Held by nobody, of no use."""
        return self.num_blocks - self.num_held - self.num_cached


def _num_admission_blocks(
    manager: GroupManager, request: Request, hit: Sequence[Block], num_slots: int, chunk_tokens: int | None
) -> int:
    """Return the blocks that a request will take, beyond its hit, by the time all its known tokens are computed."""
    # One block more than the known tokens need: a request admitted to the last block would be preempted at once.
    num_tokens = max(num_slots, request.num_tokens) + manager.block_size
    peak = manager.num_peak_blocks(num_tokens, chunk_tokens=chunk_tokens or num_tokens)
    return peak - (len(hit) - manager.num_null_blocks(hit))
