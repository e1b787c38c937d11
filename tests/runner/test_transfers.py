"""Bytes leave the cache for a store and come back into other blocks."""

import threading

import numpy as np
import pytest
import torch

from hybrid_engine.groups.layout import split_memory
from hybrid_engine.groups.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec, group_layers
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.runner.transfers import Transfers
from hybrid_engine.transfer_plan import BlockKey, BlockPart, CheckpointKey, Load, LoadId, Transfer

FULL, WINDOW, STATE = 0, 1, 2
NUM_BLOCKS = 6
CHECKPOINT = CheckpointKey(b"p" * 16, (1, 2, 3), 19)


class DictStore:
    """Keeps payloads, and tells when a load has ended."""

    def __init__(self) -> None:
        self.payloads: dict = {}
        self.ended: list = []
        self.has_ended = threading.Event()

    def put(self, key, payload) -> None:
        self.payloads[key] = payload

    def get(self, key):
        return self.payloads.get(key)

    def discard(self, key) -> None:
        del self.payloads[key]

    def end_load(self, load_id, *, is_complete, seconds) -> None:
        self.ended.append((load_id, is_complete))
        self.has_ended.set()


def make_cache(dtype: torch.dtype = torch.bfloat16) -> CacheTensors:
    """Two layers of each kind, every byte random."""
    sizes = {"num_kv_heads": 2, "head_size": 3, "element_bytes": dtype.itemsize, "block_size": 4}
    specs = [
        FullAttentionSpec(**sizes),
        SlidingWindowSpec(**sizes, window=8),
        MambaSpec((5, 3), (5, 2), dtype.itemsize),
    ]
    cache = CacheTensors(split_memory(group_layers(dict(enumerate(specs * 2))), [NUM_BLOCKS] * 3), dtype=dtype)
    for layer in cache.layers:
        for tensor in vars(layer).values():
            tensor.copy_(torch.randn(tensor.shape))
    return cache


def content(cache: CacheTensors, group_id: int, block_id: int) -> list[torch.Tensor]:
    layers = [cache.layers[index] for index in cache.groups[group_id].layer_indices]
    return [tensor[block_id].clone() for layer in layers for tensor in vars(layer).values()]


def run_load(transfers: Transfers, store: DictStore, *wanted: Transfer) -> bool:
    transfers.start(Load(LoadId(len(store.ended)), wanted))
    assert store.has_ended.wait(10)
    store.has_ended.clear()
    return store.ended[-1][1]


def block(number: int, block_id: int, group_id: int = FULL) -> Transfer:
    return Transfer(BlockKey(group_id, bytes([number]) * 16), (BlockPart(group_id, block_id, 4),))


@pytest.fixture
def store():
    return DictStore()


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def cache(request):
    torch.manual_seed(0)
    return make_cache(request.param)


@pytest.fixture
def transfers(cache, store):
    moving = Transfers(cache, store)
    yield moving
    moving.close()


@pytest.mark.parametrize("group_id", [FULL, WINDOW])
def test_a_full_block_comes_back_into_another_block(cache, store, transfers, group_id):
    before = content(cache, group_id, 2)
    transfers.save([block(1, 2, group_id), block(2, 3, group_id)])
    cache.poison(group_id, range(NUM_BLOCKS + 1), torch.nan)
    assert run_load(transfers, store, block(1, 5, group_id))
    assert all(map(torch.equal, content(cache, group_id, 5), before))
    assert all(tensor.isnan().all() for tensor in content(cache, group_id, 3))


def test_a_payload_is_exactly_the_bytes_of_its_block(cache, store, transfers):
    transfers.save([block(1, 2)])
    assert len(store.payloads[block(1, 2).key]) == cache.groups[FULL].block_bytes
    assert store.payloads[block(1, 2).key].base is None


def test_a_checkpoint_brings_its_first_slots_and_its_state_and_touches_nothing_else(cache, store, transfers):
    saved = Transfer(CHECKPOINT, (BlockPart(FULL, 1, 3), BlockPart(WINDOW, 2, 3), BlockPart(STATE, 3, 1)))
    wanted = Transfer(CHECKPOINT, (BlockPart(FULL, 4, 3), BlockPart(WINDOW, 5, 3), BlockPart(STATE, 6, 1)))
    full, state = content(cache, FULL, 1), content(cache, STATE, 3)
    untouched = content(cache, FULL, 4)
    transfers.save([saved])
    assert run_load(transfers, store, wanted)
    assert all(torch.equal(now[:, :3], then[:, :3]) for now, then in zip(content(cache, FULL, 4), full, strict=True))
    assert all(torch.equal(now[:, 3], then[:, 3]) for now, then in zip(content(cache, FULL, 4), untouched, strict=True))
    assert all(map(torch.equal, content(cache, STATE, 6), state))


def test_many_blocks_move_in_batches(cache, store, transfers, monkeypatch):
    monkeypatch.setattr("hybrid_engine.runner.transfers.BATCH_BYTES", 2 * cache.groups[FULL].block_bytes)
    before = [content(cache, FULL, block_id) for block_id in range(1, 6)]
    transfers.save([block(number, number) for number in range(1, 6)])
    assert run_load(transfers, store, *(block(number, 6 - number) for number in range(1, 6)))
    for number in range(1, 6):
        assert all(map(torch.equal, content(cache, FULL, 6 - number), before[number - 1]))


@pytest.mark.parametrize("missing", [block(9, 1), Transfer(CHECKPOINT, (BlockPart(STATE, 1, 1),))], ids=str)
def test_a_load_of_something_that_is_gone_fails(store, transfers, missing):
    transfers.save([block(1, 2)])
    assert not run_load(transfers, store, block(1, 3), missing)


def test_bytes_of_another_length_are_not_used_and_not_offered_again(store, transfers, caplog):
    store.payloads[block(1, 2).key] = np.zeros(7, np.uint8)
    assert not run_load(transfers, store, block(1, 2))
    assert store.payloads == {}
    assert "has 7 bytes, should have" in caplog.text


def test_a_store_that_breaks_ends_the_load_and_not_the_loads_after_it(store, transfers, caplog):
    transfers.save([block(1, 2)])
    get = store.get
    store.get = lambda key: 1 / 0
    assert not run_load(transfers, store, block(1, 3))
    store.get = get
    assert run_load(transfers, store, block(1, 3))
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.gpu
def test_blocks_of_a_cache_on_a_gpu_come_back(store):
    specs = {0: FullAttentionSpec(2, 3, 2, 4), 1: MambaSpec((5, 3), (5, 2), 2)}
    cache = CacheTensors(split_memory(group_layers(specs), [NUM_BLOCKS] * 2), dtype=torch.bfloat16, device="cuda")
    for layer in cache.layers:
        for tensor in vars(layer).values():
            tensor.copy_(torch.randn(tensor.shape))
    before = content(cache, 0, 2)
    moving = Transfers(cache, store)
    moving.save([block(1, 2)])
    cache.poison(0, range(NUM_BLOCKS + 1), torch.nan)
    assert run_load(moving, store, block(1, 5))
    torch.cuda.synchronize()
    assert all(map(torch.equal, content(cache, 0, 5), before))
    moving.close()
