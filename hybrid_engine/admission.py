"""A place for a waiting request: its hit, what a connector can add to it, and blocks for its first tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from hybrid_engine.config import SchedulerConfig
from hybrid_engine.connectors.base import KVConnector, KVLoad
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.explanation import CacheExplanation, with_external, with_shorter_hit
from hybrid_engine.groups.base import NEVER
from hybrid_engine.groups.block import Block
from hybrid_engine.prefix_lookup import CacheHit
from hybrid_engine.request import Request, RequestStatus, Shortage


@dataclass(frozen=True, slots=True)
class Place:
    """What a request got."""

    num_new_tokens: int
    """Tokens that it computes now; 0: it waits for a connector first."""
    num_external_tokens: int = 0


class Admission:
    """Decides whether a waiting request can start, and gives it blocks if so."""

    def __init__(self, config: SchedulerConfig, coordinator: Coordinator, connector: KVConnector | None) -> None:
        self.config = config
        self.coordinator = coordinator
        self.connector = connector
        most_tokens = config.long_prefill_token_threshold or NEVER
        # Launched steps hold their chunk of a window until they have finished.
        self._reserved: Sequence[int] | int = 0
        self._chunk_tokens = min(config.max_num_scheduled_tokens, most_tokens) * (1 + config.async_depth)

    def waits_for_a_junction(self, request: Request, running: Iterable[Request], loads: Iterable[KVLoad]) -> bool:
        """Return whether another request is just computing or fetching more of this one's prefix than is cached.

        The other one leaves a checkpoint where the two part; this one waits for it, and nobody waits for this one.
        """
        coordinator = self.coordinator
        if not coordinator.may_read(request):
            return False
        if request.junction is not None:
            awaited, position = request.junction
            is_on_its_way = awaited.status in (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_KV)
            if is_on_its_way and awaited.num_computed_tokens < position:
                return True
            request.junction = None
        best, leader = 0, None
        for load in loads:
            if load.request.status is RequestStatus.WAITING_FOR_KV:
                junction = coordinator.lookup.tokens_of_load(request, load.request, load.end_tokens)
                if junction > best:
                    best, leader = junction, load.request
        for other in running:
            if other.num_computed_tokens < other.num_prompt_tokens:
                junction = coordinator.lookup.shared_tokens(request, other)
                # A state that a launched step passes can't be asked for any more.
                num_passed = other.num_in_flight_tokens if coordinator.has_states else 0
                if junction > max(best, other.num_computed_tokens + num_passed):
                    best, leader = junction, other
        if leader is None or best < coordinator.alignment_tokens:
            return False
        hit = coordinator.lookup.find_longest_cache_hit(request)
        if best < hit.num_computed_tokens + coordinator.alignment_tokens:
            return False
        coordinator.recorder.lay_checkpoint(leader, best)
        request.junction = leader, best
        return True

    def find_place(
        self, request: Request, most_tokens: int, running: Iterable[Request], *, is_alone: bool
    ) -> Place | None:
        """Find a request's hit and give it blocks to compute up to most_tokens now; None: there is no place.

        running: who has been admitted and may not hold all that its known tokens take. is_alone: nobody holds anything,
        so that nothing is gained by waiting.
        """
        if not is_alone and self._is_still_short(request):
            return None
        self._reserved = self._find_reserved(running, is_alone=is_alone)
        hit, blocks = self.coordinator.look_up(request)
        explanation = request.cache or self.coordinator.explain(request, hit)
        place = self._find_external_place(request, hit, explanation, is_alone=is_alone)
        if place is not None:
            return place
        num_new = self._allocate(request, hit, blocks, most_tokens, is_alone=is_alone)
        while num_new == 0 and is_alone and hit.num_computed_tokens > 0:
            # Hit, copy and new blocks together exceed the memory: a shorter hit may not.
            hit, blocks = self.coordinator.lookup.collect_hit(request, max_tokens=hit.num_computed_tokens - 1)
            num_new = self._allocate(request, hit, blocks, most_tokens, is_alone=is_alone)
        if num_new == 0:
            self._note_shortage(request)
            return None
        if request.cache is None:
            explanation = with_shorter_hit(explanation, hit.num_computed_tokens)
        self._settle(request, hit, explanation)
        self.coordinator.recorder.copy_hit(request, hit)
        return Place(num_new)

    def _find_reserved(self, running: Iterable[Request], *, is_alone: bool) -> Sequence[int] | int:
        """Return the blocks that must stay free: a margin, and what those that were admitted before were promised."""
        if is_alone or not self.config.full_sequence_must_fit:
            return 0 if is_alone else self.config.reserved_blocks
        outstanding = self.coordinator.outstanding_blocks(running, chunk_tokens=self._chunk_tokens)
        return [count + self.config.reserved_blocks for count in outstanding]

    def _settle(self, request: Request, hit: CacheHit, explanation: CacheExplanation) -> None:
        request.num_computed_tokens = hit.num_computed_tokens
        request.cache = explanation
        request.shortage = None
        request.shared_prefix_boundary = hit.shared_prefix_boundary
        request.checkpoint_positions = self.coordinator.recorder.checkpoint_positions(request, hit)

    def _allocate(
        self, request: Request, hit: CacheHit, blocks: Sequence[Sequence[Block]], most_tokens: int, *, is_alone: bool
    ) -> int:
        """Give a waiting request the blocks of its first chunk; return the chunk's tokens, 0: no place."""
        if hit.checkpoint is not None:
            # Before blocks are taken, so that it isn't the one to make room for whoever goes on from it.
            self.coordinator.checkpoints.touch(hit.checkpoint)
        num_new = min(request.num_tokens - hit.num_computed_tokens, most_tokens)
        while num_new > 0:
            if self.coordinator.allocate_slots(
                request,
                num_new,
                num_new_computed_tokens=hit.num_computed_tokens,
                new_computed_blocks=blocks,
                partial_blocks=hit.checkpoint.blocks if hit.checkpoint else (),
                # Alone it takes what there is: its known tokens fit, or it would have been refused.
                full_sequence_must_fit=self.config.full_sequence_must_fit and not is_alone,
                chunk_tokens=self._chunk_tokens,
                num_draft_slots=self.config.draft_slots,
                reserved_blocks=self._reserved,
                watermark=0.0 if is_alone else self.config.watermark,
            ):
                return num_new
            # Alone, a smaller chunk is tried: it needs fewer window blocks.
            num_new = num_new // 2 if is_alone else 0
        return 0

    def _find_external_place(
        self, request: Request, hit: CacheHit, explanation: CacheExplanation, *, is_alone: bool
    ) -> Place | None:
        """Give a request the blocks for what a connector brings; None: it brings nothing, or there is no place."""
        coordinator = self.coordinator
        if self.connector is None or request.skips_connector or not coordinator.may_read(request):
            return None
        # A load fills whole blocks: what the hit has of the last one comes again.
        local = coordinator.lookup.align(hit.num_computed_tokens)
        num_external = self.connector.find(request, local)
        end = local + num_external
        if end <= hit.num_computed_tokens:
            return None
        assert end <= request.max_hit_tokens, (
            f"a connector offers {end} of {request.max_hit_tokens} tokens of {request}"
        )
        if not coordinator.allocate_slots(
            request,
            0,
            num_new_computed_tokens=local,
            new_computed_blocks=coordinator.lookup.collect_for_external(request, local, end),
            num_external_computed_tokens=num_external,
            delay_cache_blocks=True,
            full_sequence_must_fit=self.config.full_sequence_must_fit and not is_alone,
            chunk_tokens=self._chunk_tokens,
            num_draft_slots=self.config.draft_slots,
            reserved_blocks=self._reserved,
            watermark=0.0 if is_alone else self.config.watermark,
        ):
            return None
        brought = replace(hit, num_computed_tokens=end, checkpoint=None)
        if request.cache is None:
            explanation = with_external(with_shorter_hit(explanation, local), num_external)
        self._settle(request, brought, explanation)
        request.num_computed_tokens = local
        return Place(0, num_external_tokens=num_external)

    def _note_shortage(self, request: Request) -> None:
        """Remember what was missing, so that the prompt isn't looked up again before it can matter."""
        # Without whole-sequence admission a smaller chunk may fit.
        if self.config.full_sequence_must_fit and self.coordinator.last_shortage is not None:
            arena, num_short = self.coordinator.last_shortage
            # Each block that is let go leaves at most one extent.
            num_freed = arena.num_freed + num_short
            request.shortage = Shortage(arena, num_freed, self.coordinator.checkpoints.num_recorded)

    def _is_still_short(self, request: Request) -> bool:
        short = request.shortage
        if short is None or short.arena.num_freed >= short.num_freed:
            return False
        return not self.coordinator.has_states or short.num_recorded == self.coordinator.checkpoints.num_recorded
