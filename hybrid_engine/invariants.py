"""What must hold in the bookkeeping between any two calls; tests ask after every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from hybrid_engine.coordinator import Coordinator
from hybrid_engine.groups.base import GroupManager
from hybrid_engine.request import Request, RequestStatus


def check_invariants(coordinator: Coordinator, holders: Iterable[Request]) -> None:
    """Raise AssertionError, with the facts, when the pools don't agree with what requests hold.

    holders: all requests that hold blocks: those that run, land or are being loaded.
    """
    requests = list(holders)
    for request in requests:
        assert request.held is not None, f"{request} holds no blocks"
        assert request.num_in_flight_tokens >= 0, f"{request}: {request.num_in_flight_tokens} tokens in flight"
        assert request.num_placeholders >= 0, f"{request}: {request.num_placeholders} placeholders"
    for i, manager in enumerate(coordinator.managers):
        held: Counter[int] = Counter(block.block_id for prefix in coordinator.pins.held for block in prefix.blocks[i])
        for request in requests:
            assert request.held is not None
            table = request.held.tables[i]
            held.update(block.block_id for block in table if block is not manager.pool.null_block)
            held.update(targets[i].block_id for _, targets in request.held.captures if i in targets)
            pinned = [pair for _, blocks in request.held.pinned for pair in blocks]
            held.update(block.block_id for pool, block in pinned if pool is manager.pool)
            _check_table(manager, request, i)
        _check_pool(manager, held)
    for i, manager in enumerate(coordinator.managers):
        if manager.pool.needed is not None:
            keys = {key for checkpoint in coordinator.checkpoints for key in checkpoint.keys[i]}
            assert manager.pool.needed.keys() == keys, f"group {i} keeps other blocks than its checkpoints need"
    for checkpoint in coordinator.checkpoints:
        for block in checkpoint.blocks:
            assert block is None or checkpoint in block.checkpoints, f"{block} doesn't know its checkpoint"


def _check_table(manager: GroupManager, request: Request, group_index: int) -> None:
    held = request.held
    assert held is not None
    table = held.tables[group_index]
    num_blocks = -(-(request.num_computed_tokens + request.num_in_flight_tokens) // manager.block_size)
    assert len(table) >= num_blocks, f"{request}: {len(table)} blocks for {num_blocks} in group {group_index}"
    first = manager.first_needed_block(request.num_computed_tokens)
    if request.status in (RequestStatus.WAITING_FOR_KV, RequestStatus.FINISHED):
        # A load, also one whose request was aborted: what is needed where it will end.
        first = max(first, held.first_needed[group_index])
    needed = table[first:]
    assert manager.pool.null_block not in needed, f"{request}: a needed block of group {group_index} is null"
    for block_index, block in enumerate(table):
        if block.block_hash is not None:
            key = manager.key(request.block_hashes, block_index)
            assert block.block_hash == key, f"{request}: {block} at {block_index} has another prefix's key"
            is_full = (block_index + 1) * manager.block_size <= request.num_computed_tokens
            assert is_full, f"{request}: {block} at {block_index} can be found before it is written"


def _check_pool(manager: GroupManager, held: Counter[int]) -> None:
    pool = manager.pool
    empty = list(pool.empty)
    cached = list(pool.free)
    free_ids = [block.block_id for block in (*empty, *cached)]
    assert len(free_ids) == len(set(free_ids)), "a block is free twice"
    assert pool.null_block.block_id not in free_ids, "the null block can be given out"
    assert len(free_ids) + len(held) == pool.num_owned, f"{len(free_ids)} free + {len(held)} held != all"
    assert pool.num_held == len(held), f"{pool.num_held} held, should be {len(held)}"
    for block in pool.blocks():
        assert block.ref_count == held[block.block_id], f"{block} is held {held[block.block_id]} times"
    for block in empty:
        assert not block.is_known, f"{block} is empty but can be found"
        assert block.queue is None, f"{block} is empty but queued"
    for block in cached:
        assert block.is_known, f"{block} is cached but can't be found"
        assert block.queue is not None, f"{block} is cached but not queued"
    _check_keys(manager)
    _check_needs(manager)


def _check_keys(manager: GroupManager) -> None:
    pool = manager.pool
    keyed = Counter(block.block_hash for block in pool.blocks() if block.block_hash is not None)
    for block_hash, count in keyed.items():
        copies = [pool.cached[block_hash], *pool.duplicates.get(block_hash, ())]
        assert len(copies) == count, f"{count} blocks have key {block_hash.hex()}, {len(copies)} are found"
        free_copies = [block for block in copies if block.ref_count == 0]
        assert count == 1 or not free_copies, f"{free_copies} are kept beside copies of the same content"
    assert keyed.keys() == pool.cached.keys(), "a key is found that no block has"


def _check_needs(manager: GroupManager) -> None:
    pool = manager.pool
    if pool.needed is None:
        return
    for block in pool.free:
        is_of_use = block.block_hash in pool.needed or block.checkpoints
        assert is_of_use, f"{block} is cached, but no checkpoint needs it"
    for block_hash in pool.needed:
        assert block_hash in pool.cached, f"a checkpoint needs {block_hash.hex()}, which is gone"
