"""Device, then host memory, then disk: what the device gives up is stored, and comes back when a prompt wants it.

Each step's plan takes along what is to be moved. Blocks that are about to be given out again are copied out before
anything is written; the blocks of a load are filled while the steps of other requests run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from hybrid_engine.connectors.base import KVLoad, KVLoadResult
from hybrid_engine.connectors.external_lookup import ExternalHit, ExternalLookup, Stored
from hybrid_engine.connectors.rates import FetchRates
from hybrid_engine.connectors.store import TieredStore
from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.block import Block
from hybrid_engine.groups.checkpoints import Checkpoint
from hybrid_engine.groups.hashing import BlockHash
from hybrid_engine.request import Request
from hybrid_engine.step_plan import BlockCopy, BlockId, TransferPlan
from hybrid_engine.transfer_plan import (
    BlockKey,
    BlockPart,
    CheckpointKey,
    Load,
    LoadId,
    StoreKey,
    Transfer,
)

FLUSH_BYTES = 64 << 20
"""A flush copies so much at once, and waits for the disk in between."""


@dataclass(frozen=True)
class TierStats:
    """Counters since the connector was made, and what it has measured."""

    has_disk: bool
    host_bytes: int
    disk_bytes: int
    """Of files; what waits to be written is not counted."""
    num_saved: int
    """Things that were to be stored: blocks, and checkpoints' own parts."""
    num_not_stored: int
    """Of these, the ones that the disk could not take, or not fast enough."""
    num_loads: int
    """Prompts for which something was brought."""
    num_failed_loads: int
    """Prompts that were computed since something was gone or wrong."""
    num_not_fetched_tokens: int
    """Tokens that were stored but faster to compute again."""
    bytes_per_second: Mapping[str, float]
    """By tier, 'host' or 'disk'; a tier that was never measured is left out."""
    tokens_per_second: float | None
    """Prompt tokens computed; None: not measured yet."""


class TieredConnector(Stored):
    """Plans what is stored and what is loaded, for one coordinator; the runner moves the bytes."""

    def __init__(self, coordinator: Coordinator, store: TieredStore) -> None:
        """Listen to what the coordinator's pools give up from now on."""
        self.store = store
        self.rates = FetchRates()
        self.num_saved = 0
        self.num_loads = 0
        self.num_failed_loads = 0
        self.num_not_fetched_tokens = 0
        self._coordinator = coordinator
        self._lookup = ExternalLookup(coordinator, self)
        self._saves: dict[StoreKey, Transfer] = {}
        self._saved_checkpoints: dict[bytes, dict[tuple[int, ...], CheckpointKey]] = {}
        self._loads: list[Load] = []
        self._copies: list[BlockCopy] = []
        self._asked: list[KVLoad] = []
        self._bytes_of_load: dict[int, Mapping[str, int]] = {}
        self._refused: list[KVLoadResult] = []
        keepers = (i for i, manager in enumerate(coordinator.managers) if manager.keeps_everything)
        store.plain_groups = frozenset(keepers)
        for i, manager in enumerate(coordinator.managers):
            manager.pool.on_evicted = partial(self._save_block, i)
        coordinator.checkpoints.on_given_up = self._save_checkpoint

    # What can be had

    def has(self, key: StoreKey) -> bool:
        return key in self.store or key in self._saves

    def checkpoints_behind(self, parent: bytes) -> Mapping[tuple[int, ...], CheckpointKey]:
        stored, saved = self.store.checkpoints_behind(parent), self._saved_checkpoints.get(parent)
        return {**stored, **saved} if saved else stored

    def find(self, request: Request, num_local_tokens: int) -> int:
        """Return how many tokens beyond the local ones are stored and faster fetched than computed."""
        self.store.refresh()
        if self.store.is_empty() and not self._saves:
            return 0
        hit = self._lookup.find(request)
        keys = hit.stored_keys(self._first_blocks(num_local_tokens))
        num_tokens = hit.num_tokens - num_local_tokens
        if not keys or num_tokens <= 0:
            return 0
        num_bytes = self.store.bytes_by_tier(keys)
        if not self.rates.is_worth_fetching(num_tokens, num_bytes):
            self.rates.forget_a_little(num_bytes)
            self.num_not_fetched_tokens += num_tokens
            return 0
        return num_tokens

    def _first_blocks(self, num_local_tokens: int) -> list[int]:
        return [num_local_tokens // manager.block_size for manager in self._coordinator.managers]

    # Loads

    def start_load(self, load: KVLoad) -> None:
        """Let a load begin with the next step."""
        self._asked.append(load)

    def _plan_load(self, load: KVLoad) -> None:
        """Plan what comes from the store, and copies of what the device has itself."""
        hit = self._lookup.find(load.request, max_tokens=load.end_tokens)
        if hit.num_tokens != load.end_tokens:
            # Something has gone since it was found.
            self._refused.append(KVLoadResult(load.load_id, False))
            self.num_failed_loads += 1
            return
        load_id = LoadId(load.load_id)
        transfers = tuple(self._transfers(load, hit))
        keys = [transfer.key for transfer in transfers]
        self._bytes_of_load[load_id] = self.store.bytes_by_tier(keys)
        self.store.hold(load_id, keys)
        self._loads.append(Load(load_id, transfers))

    def _transfers(self, load: KVLoad, hit: ExternalHit) -> Iterator[Transfer]:
        """List what comes from the store; plan copies of what the device has."""
        first_blocks = self._first_blocks(load.num_local_tokens)
        for i, (table, first) in enumerate(zip(hit.tables, first_blocks, strict=True)):
            manager = self._coordinator.managers[i]
            for block_index in range(first, len(table)):
                source, target_id = table[block_index], load.block_ids[i][block_index]
                if isinstance(source, BlockKey):
                    yield Transfer(source, (BlockPart(i, target_id, manager.block_size),))
                elif source is not manager.pool.null_block:
                    self._copy(i, source, target_id, manager.block_size)
        if isinstance(hit.checkpoint, CheckpointKey):
            parts = self._parts(hit.num_tokens)
            yield Transfer(
                hit.checkpoint,
                tuple(BlockPart(i, load.block_ids[i][index], num_slots) for i, index, num_slots in parts),
            )
        elif hit.checkpoint is not None:
            for i, index, num_slots in self._parts(hit.num_tokens):
                part = hit.checkpoint.blocks[i]
                assert part is not None, f"{hit.checkpoint} has no part in group {i}"
                self._copy(i, part, load.block_ids[i][index], num_slots)

    def _parts(self, position: int) -> list[tuple[int, int, int]]:
        """Return what a checkpoint itself has at a position: group, index in the block table, slots."""
        return [
            (i, position // manager.block_size, 1 if manager.is_state else position % manager.block_size)
            for i, manager in enumerate(self._coordinator.managers)
            if position % manager.block_size
        ]

    def _copy(self, group_index: int, source: Block, target_id: BlockId, num_slots: int) -> None:
        group_id = self._coordinator.groups[group_index].group_id
        self._copies.append(BlockCopy(group_id, source.block_id, target_id, num_slots))

    def take_finished(self) -> Sequence[KVLoadResult]:
        """Return the loads that have ended since this was last asked."""
        finished, self._refused = self._refused, []
        for ended in self.store.take_ended():
            num_bytes = self._bytes_of_load.pop(ended.load_id)
            if ended.is_complete:
                self.rates.note_load(num_bytes, ended.seconds)
                self.num_loads += 1
            else:
                self.num_failed_loads += 1
            finished.append(KVLoadResult(ended.load_id, ended.is_complete))
        return finished

    def wait(self, timeout_seconds: float) -> None:
        """Return when a load has ended, or after a while."""
        if not self._refused:
            self.store.has_ended.wait(timeout_seconds)

    # Saves

    def _save_block(self, group_index: int, block_hash: BlockHash, block: Block) -> None:
        self._save(self._block_transfer(group_index, block_hash, block))

    def _save_checkpoint(self, checkpoint: Checkpoint) -> None:
        transfer = self._checkpoint_transfer(checkpoint)
        if transfer.parts:
            self._save(transfer)

    def _block_transfer(self, group_index: int, block_hash: BlockHash, block: Block) -> Transfer:
        block_id = self._coordinator.memory.stored_id(group_index, block)
        part = BlockPart(group_index, block_id, self._coordinator.managers[group_index].block_size)
        return Transfer(BlockKey(group_index, block_hash), (part,))

    def _checkpoint_transfer(self, checkpoint: Checkpoint) -> Transfer:
        parts = []
        for i, _, num_slots in self._parts(checkpoint.position):
            block = checkpoint.blocks[i]
            assert block is not None, f"{checkpoint} has no part in group {i}"
            parts.append(BlockPart(i, self._coordinator.memory.stored_id(i, block), num_slots))
        return Transfer(CheckpointKey(checkpoint.parent, checkpoint.tail, checkpoint.position), tuple(parts))

    def _save(self, transfer: Transfer) -> None:
        key = transfer.key
        if key in self._saves or not self.store.wants(key):
            return
        self._saves[key] = transfer
        self.num_saved += 1
        if isinstance(key, CheckpointKey):
            self._saved_checkpoints.setdefault(key.parent, {})[key.tail] = key

    def flush(self, move: Callable[[TransferPlan], None]) -> None:
        """Store all that the device could go on from and that the disk lacks; nothing where there is no disk tier.

        Spare checkpoints are left out, here as when memory is short.

        move: does what a plan says before it returns.
        """
        if self.store.disk is None:
            return
        num_bytes = 0
        for transfer in list(self._device_things()):
            if transfer.key not in self.store.disk:
                self._saves[transfer.key] = transfer
                self.num_saved += 1
                num_bytes += sum(self._coordinator.groups[part.group_id].block_bytes for part in transfer.parts)
            if num_bytes >= FLUSH_BYTES:
                move(self.take_transfers())
                self.store.flush()
                num_bytes = 0
        move(self.take_transfers())
        self.store.flush()

    def end(self, move: Callable[[TransferPlan], None]) -> None:
        """Flush, and stop what runs beside the engine."""
        self.flush(move)
        self.store.close()

    def _device_things(self) -> Iterator[Transfer]:
        for i, manager in enumerate(self._coordinator.managers):
            for block_hash, block in manager.pool.cached.items():
                if not manager.pool.free.is_evicted_first(block):
                    yield self._block_transfer(i, block_hash, block)
        for checkpoint in self._coordinator.checkpoints.worth_keeping():
            transfer = self._checkpoint_transfer(checkpoint)
            if transfer.parts:
                yield transfer

    def stats(self) -> TierStats:
        """Return what the tiers hold and what has been moved."""
        host, disk = self.store.host, self.store.disk
        return TierStats(
            has_disk=disk is not None,
            host_bytes=host.num_bytes if host is not None else 0,
            disk_bytes=disk.num_bytes if disk is not None else 0,
            num_saved=self.num_saved,
            num_not_stored=disk.num_not_stored if disk is not None else 0,
            num_loads=self.num_loads,
            num_failed_loads=self.num_failed_loads,
            num_not_fetched_tokens=self.num_not_fetched_tokens,
            bytes_per_second=dict(self.rates.bytes_per_second),
            tokens_per_second=self.rates.tokens_per_second,
        )

    # A step's share

    def take_transfers(self) -> TransferPlan:
        """Return what the next step is to move, and forget it here."""
        # Only now: nobody can be given a block any more that is to be copied, before the copy is made.
        for load in self._asked:
            self._plan_load(load)
        self._asked = []
        plan = TransferPlan(tuple(self._saves.values()), tuple(self._copies), tuple(self._loads))
        self._copies, self._loads = [], []
        self._saves.clear()
        self._saved_checkpoints.clear()
        return plan

    def note_step(self, num_tokens: int, seconds: float) -> None:
        """Learn how fast tokens are computed."""
        self.rates.note_step(num_tokens, seconds)

    def reset(self) -> None:
        """Forget all that is stored, files included."""
        self._saves.clear()
        self._saved_checkpoints.clear()
        self.store.clear()
