"""Which positions become checkpoints, and the recurrent states that are kept for them."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hybrid_engine.config import CacheConfig
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoint_tree import Path
from hybrid_engine.groups.checkpoints import Checkpoint, CheckpointIndex, CheckpointKind, is_spare
from hybrid_engine.groups.pool import BlockPool
from hybrid_engine.groups.spec import Group
from hybrid_engine.prefix_lookup import CacheHit, PrefixLookup
from hybrid_engine.request import HeldBlocks, Request

MIN_FREE_PART = 4
"""A quarter of the memory stays free of checkpoints that running requests lay on their way."""


class PlannedCapture(NamedTuple):
    """A state that the next step writes for a checkpoint."""

    request: Request
    group_id: int
    position: int
    target: Block


class CheckpointRecorder:
    """Lays checkpoints for running requests and at their ends, and holds what they need meanwhile."""

    def __init__(
        self,
        groups: Sequence[Group],
        managers: Sequence[GroupManager],
        lookup: PrefixLookup,
        checkpoints: CheckpointIndex,
        config: CacheConfig,
        *,
        copy: Callable[[int, Block, Block, int], None],
    ) -> None:
        """copy: has the first slots of a group's block copied to another before the next step."""
        self.groups = groups
        self._copy = copy
        self.managers = managers
        self.lookup = lookup
        self.checkpoints = checkpoints
        self.config = config
        self._states = tuple(i for i, manager in enumerate(managers) if manager.is_state)

    def checkpoint_positions(self, request: Request, hit: CacheHit) -> list[int]:
        """Return where a request that starts at a hit is to leave states behind, ascending; none without state groups.

        The prompt's end, for whoever goes on with the answer; the last aligned position before it, for the same prompt
        again; the boundary, where others have parted from this prompt; the ends of messages; and every so often.
        """
        if not self._states or not self.config.enable_prefix_caching:
            return []
        num_prompt = request.num_prompt_tokens
        positions = {num_prompt, self.lookup.align(num_prompt - 1), *request.message_boundaries}
        positions.add(hit.shared_prefix_boundary or 0)
        if self.config.checkpoint_interval:
            positions.update(range(self.config.checkpoint_interval, num_prompt, self.config.checkpoint_interval))
        return sorted(position for position in positions if hit.num_computed_tokens < position <= num_prompt)

    def lay_checkpoint(self, request: Request, position: int) -> None:
        """Ask a request that has not come so far to leave its states behind at a position; no matter without states."""
        if self._states and position not in request.checkpoint_positions:
            insort(request.checkpoint_positions, position)

    def take_captures(self, request: Request, num_new_tokens: int) -> list[PlannedCapture]:
        """Take a block for each state that a request's next tokens pass and that is to be kept, while there are any.

        All but the prompt's end leave a part of the blocks to requests that have none yet: what a running request laid
        stays while it runs, and a long prefill would else take every state there is.
        """
        start = request.num_computed_tokens + request.num_in_flight_tokens
        end, held = start + num_new_tokens, request.held
        captures: list[PlannedCapture] = []
        for position in request.checkpoint_positions:
            is_end = position == request.num_prompt_tokens
            if start < position <= end and all(self._has_room(i, is_end) for i in self._states):
                assert held is not None
                targets = {i: self.managers[i].pool.take(1)[0] for i in self._states}
                held.captures.append((position, targets))
                captures += [
                    PlannedCapture(request, self.groups[i].group_id, position, target) for i, target in targets.items()
                ]
        return captures

    def _has_room(self, group_index: int, is_end: bool) -> bool:
        pool = self.managers[group_index].pool
        num_reserved = 0 if is_end else pool.arena.num_extents // MIN_FREE_PART
        return pool.has_room(1, num_reserved=num_reserved)

    def keep_captures(self, request: Request) -> None:
        """Make the states that finished steps wrote positions to go on from, and hold them while the request runs."""
        held = request.held
        assert held is not None
        num_written = sum(position <= request.num_computed_tokens for position, _ in held.captures)
        written, held.captures = held.captures[:num_written], held.captures[num_written:]
        for position, targets in written:
            self._keep(request, held, position, targets)

    def keep_loaded(self, request: Request) -> None:
        """Let others go on from where a load has ended; of states a copy is kept, if somebody waits for them."""
        held, position = request.held, request.num_computed_tokens
        assert held is not None
        if not self._states:
            self.record_checkpoint(request)
        elif position in request.checkpoint_positions and all(self._has_room(i, is_end=False) for i in self._states):
            targets = {i: self.managers[i].pool.take(1)[0] for i in self._states}
            for i, target in targets.items():
                self._copy(i, held.tables[i][0], target, 1)
            self._keep(request, held, position, targets)

    def _keep(self, request: Request, held: HeldBlocks, position: int, targets: Mapping[int, Block]) -> None:
        made = self._make_checkpoint(request, position, targets)
        made.kind = self._kind(request, position)
        made.is_periodic = made.kind is CheckpointKind.PERIODIC
        checkpoint = self._record(request, made)
        if checkpoint is not None and self._has_beginning(held, checkpoint):
            self._pin(held, checkpoint)
        if made.is_periodic:
            self._thin_path(request, position)
        for i, target in targets.items():
            self.managers[i].pool.release((target,))

    def _kind(self, request: Request, position: int) -> CheckpointKind:
        """Return what a checkpoint on a request's way is laid for; PERIODIC: for no reason but that the way is long."""
        interval, num_prompt = self.config.checkpoint_interval, request.num_prompt_tokens
        if position == num_prompt:
            return CheckpointKind.PROMPT_END
        if position == request.shared_prefix_boundary:
            return CheckpointKind.JUNCTION
        if position in request.message_boundaries:
            return CheckpointKind.MESSAGE_END
        if position == self.lookup.align(num_prompt - 1):
            return CheckpointKind.LAST_BLOCK
        return CheckpointKind.PERIODIC if interval and position % interval == 0 else CheckpointKind.JUNCTION

    def _thin_path(self, request: Request, newest: int) -> None:
        """Thin the periodic checkpoints of a prompt below the one that it just laid."""
        interval, unit, held = self.config.checkpoint_interval, self.lookup.match_unit_tokens, request.held
        assert held is not None
        for position in range(interval, newest, interval):
            if is_spare(position, newest, interval):
                tail = tuple(request.token_ids[position // unit * unit : position])
                checkpoint = self.checkpoints.get(request.hash_at(position // unit), tail)
                if checkpoint is not None and checkpoint.is_periodic:
                    self.checkpoints.thin(checkpoint)
                    self._unpin(held, checkpoint)

    def _make_checkpoint(self, request: Request, position: int, states: Mapping[int, Block]) -> Checkpoint:
        held, unit = request.held, self.lookup.match_unit_tokens
        assert held is not None
        partials = [
            table[position // manager.block_size] if position % manager.block_size else None
            for table, manager in zip(held.tables, self.managers, strict=True)
        ]
        return Checkpoint(
            position=position,
            parent=request.hash_at(position // unit),
            tail=tuple(request.token_ids[position // unit * unit : position]),
            blocks=tuple(states.get(i, partial) for i, partial in enumerate(partials)),
            keys=tuple(manager.needed_keys(request.block_hashes, position) for manager in self.managers)
            if self._states
            else (),
        )

    def _record(self, request: Request, checkpoint: Checkpoint) -> Checkpoint | None:
        """Keep a checkpoint unless a block that it needs can't be found: the cache was reset while its request ran."""
        for manager, keys in zip(self.managers, checkpoint.keys, strict=False):
            if not manager.pool.can_need(keys):
                return None
        path = Path(request.root_hash, request.block_hashes, request.token_ids)
        return self.checkpoints.record(checkpoint, path)

    def _has_beginning(self, held: HeldBlocks, checkpoint: Checkpoint) -> bool:
        """Return whether a request's own table has the checkpoint's full blocks; after a reset others may have them."""
        return all(
            not checkpoint.keys[i] or held.tables[i][0].block_hash == checkpoint.keys[i][0]
            for i, manager in enumerate(self.managers)
            if manager.keeps_everything
        )

    def _pin(self, held: HeldBlocks, checkpoint: Checkpoint) -> None:
        blocks: list[tuple[BlockPool, Block]] = []
        for manager, keys, partial in zip(self.managers, checkpoint.keys, checkpoint.blocks, strict=True):
            # The full blocks of what keeps everything are in the request's own table until it ends.
            if not manager.keeps_everything:
                blocks += [(manager.pool, manager.pool.cached[key]) for key in keys]
            if partial is not None:
                blocks.append((manager.pool, partial))
        for pool, block in blocks:
            pool.pin((block,))
        self.checkpoints.pin(checkpoint)
        held.pinned.append((checkpoint, blocks))

    def unpin_checkpoints(self, held: HeldBlocks) -> None:
        """Let the checkpoints that a request laid go the way of all others."""
        for checkpoint, _ in list(held.pinned):
            self._unpin(held, checkpoint)

    def _unpin(self, held: HeldBlocks, checkpoint: Checkpoint) -> None:
        for entry in [entry for entry in held.pinned if entry[0] is checkpoint]:
            held.pinned.remove(entry)
            self.checkpoints.unpin(checkpoint)
            for pool, block in entry[1]:
                pool.release((block,))

    def unpin(self, held: HeldBlocks) -> None:
        """Let go of all that a request which ends holds beside its tables."""
        self.unpin_checkpoints(held)
        for _, targets in held.captures:
            for i, target in targets.items():
                self.managers[i].pool.release((target,))
        held.captures = []

    def copy_hit(self, request: Request, hit: CacheHit) -> None:
        """Have copied what a request that took a hit inside a block is to go on writing."""
        held, checkpoint = request.held, hit.checkpoint
        if held is None or checkpoint is None:
            return
        for i, (manager, source) in enumerate(zip(self.managers, checkpoint.blocks, strict=True)):
            if source is not None:
                target = held.tables[i][checkpoint.position // manager.block_size]
                num_slots = 1 if manager.is_state else checkpoint.position % manager.block_size
                self._copy(i, source, target, num_slots)

    def record_checkpoint(self, request: Request) -> None:
        """Make the end of what a request has computed a position to go on from, also inside a block.

        A recurrent state is kept as the block that the request has written, so that it must not write it again.
        """
        held, position = request.held, request.num_computed_tokens
        if held is None or not self.config.enable_prefix_caching or position == 0:
            return
        if self._states:
            # Only at the position that the states were really built from, and when no launched step goes on writing.
            if held.state_position == position and not request.num_in_flight_tokens:
                states = {i: held.tables[i][0] for i in self._states}
                self._record(request, self._make_checkpoint(request, position, states))
        elif position != self.lookup.align(position):
            self._record(request, self._make_checkpoint(request, position, {}))

    def record_prompt_end(self, request: Request) -> None:
        """Make a prompt's end a position to go on from while the request that computed it goes on itself."""
        # A recurrent state goes on with it: where there is one, it was captured instead, if there was place.
        if not self._states:
            self.record_checkpoint(request)
