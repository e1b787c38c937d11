"""The memory behind the blocks: for each layer its keys and values, or its states."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.layout import MemoryLayout
from hybrid_engine.groups.spec import AttentionSpec, LayerSpec, MambaSpec
from hybrid_engine.kernels.attention import copy_blocks
from hybrid_engine.models.base import LayerCache, StateCache
from hybrid_engine.step_plan import NULL_BLOCK_ID, WHOLE_BLOCK, BlockCopy


class CacheTensors:
    """Keys, values and states of all layers, in one allocation. Blocks belong to the bookkeeping; this has their bytes.

    A layer's tensor is a view that has a row for each block id, block or not: row i starts i units behind row 0, so
    that the rows of ids which are no blocks of this group overlap those of others. Nobody may read or write them.
    A block of a state group is one slot, which holds one state.
    """

    def __init__(self, layout: MemoryLayout, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> None:
        """Allocate, uninitialised: a slot is written before it is read.

        The groups' layers must be 0 .. L-1. Raises CapacityError when the memory can't be had.
        """
        layout.check()
        self.layout = layout
        self.groups = layout.groups
        self._bytes_X = _allocate(layout.num_bytes, device)
        layers: dict[int, LayerCache | StateCache] = {}
        for i, group in enumerate(self.groups):
            make = _make_states if isinstance(group.spec, MambaSpec) else _make_keys_and_values
            for layer_index, offsets in zip(group.layer_indices, layout.pages[i].offsets, strict=True):
                layers[layer_index] = make(group.spec, dtype, _Rows(self, i, offsets))
        assert sorted(layers) == list(range(len(layers))), f"groups have layers {sorted(layers)}, some are missing"
        self.layers = tuple(layers[layer_index] for layer_index in range(len(layers)))
        """By layer index; layer 0 first."""

    def view(self, group_index: int, offset_bytes: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a tensor of contiguous elements, offset_bytes into each block, with a row for each block id."""
        region, index = self.layout.region_of(group_index)
        size, stride = dtype.itemsize, [1]
        for length in shape[:0:-1]:
            stride.insert(0, stride[0] * length)
        start, row = region.start_bytes + offset_bytes, region.unit_bytes
        assert start % size == row % size == 0, f"{dtype} at {start}, rows {row} apart"
        return self._bytes_X.view(dtype).as_strided(
            (region.num_ids(index), *shape), (row // size, *stride), start // size
        )

    def blocks(self, group_index: int) -> Tensor:
        """Return the bytes of whole blocks, all layers together: uint8, with a row for each block id."""
        return self.view(group_index, 0, (self.layout.pages[group_index].stride_bytes,), torch.uint8)

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first slots of blocks, or whole ones, in every layer of their group, in the order given."""
        for run in _runs(copies):
            group_id = run[0].group_id
            for copy in run:
                self._check_block(group_id, copy.source_id)
                self._check_block(group_id, copy.target_id)
            if run[0].num_slots == WHOLE_BLOCK or isinstance(self.groups[group_id].spec, MambaSpec):
                self._copy_whole(group_id, run)
                continue
            wanted = [(copy.source_id, copy.target_id, copy.num_slots) for copy in run]
            for layer_index in self.groups[group_id].layer_indices:
                cache = self.layers[layer_index]
                assert isinstance(cache, LayerCache), f"slots of a state in {run}"
                copy_blocks(cache.k_BKPD, cache.v_BKPD, copies=wanted)

    def _copy_whole(self, group_id: int, copies: Sequence[BlockCopy]) -> None:
        """Copy whole blocks; no target may be a source."""
        blocks_BX = self.blocks(group_id)
        if len(copies) == 1 or blocks_BX.device.type == "cpu":
            for copy in copies:
                blocks_BX[copy.target_id] = blocks_BX[copy.source_id]
            return
        sources, targets = ([copy.source_id for copy in copies], [copy.target_id for copy in copies])
        blocks_BX[targets] = blocks_BX[sources]

    def copy_states(self, group_id: int, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy whole states of a state group in every layer, all at once: no target may be a source."""
        blocks_BX = self.blocks(group_id)
        blocks_BX[list(target_ids)] = blocks_BX[list(source_ids)]

    def poison_all(self) -> None:
        """Make everything NaN, as `poison`: in each of the types that tensors here have, all bits set mean that."""
        self._bytes_X.fill_(255)

    def poison(self, group_id: int, block_ids: Sequence[int], value: float) -> None:
        """Overwrite whole blocks, the null block too if asked, so that a test sees who reads what nobody wrote."""
        for layer_index in self.groups[group_id].layer_indices:
            for tensor_B in vars(self.layers[layer_index]).values():
                tensor_B[list(block_ids)] = value

    def _check_block(self, group_id: int, block_id: int) -> None:
        num_ids = self.layout.num_ids(group_id)
        assert NULL_BLOCK_ID < block_id < num_ids, f"block {block_id} of group {group_id}, ids are below {num_ids}"


class _Rows:
    """Makes the views of one layer's tensors, one after the other."""

    def __init__(self, tensors: CacheTensors, group_index: int, offsets: Sequence[int]) -> None:
        self._tensors, self._group_index = tensors, group_index
        self._planned = iter(zip(offsets, tensors.groups[group_index].spec.tensor_bytes, strict=True))

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        offset, num_bytes = next(self._planned)
        needed = math.prod(shape) * dtype.itemsize
        assert needed == num_bytes, f"a tensor {list(shape)} of {dtype} where {num_bytes} bytes are planned"
        return self._tensors.view(self._group_index, offset, shape, dtype)


def _make_keys_and_values(spec: LayerSpec, dtype: torch.dtype, rows: _Rows) -> LayerCache:
    assert isinstance(spec, AttentionSpec), spec
    assert spec.element_bytes == dtype.itemsize, f"{spec} planned, {dtype} to be kept"
    shape = (spec.num_kv_heads, spec.block_size)
    return LayerCache(rows.next((*shape, spec.head_size), dtype), rows.next((*shape, spec.value_size), dtype))


def _make_states(spec: LayerSpec, dtype: torch.dtype, rows: _Rows) -> StateCache:
    assert isinstance(spec, MambaSpec), spec
    assert spec.conv_element_bytes == dtype.itemsize, f"{spec} planned, {dtype} to be kept"
    assert spec.ssm_element_bytes == torch.float32.itemsize, f"{spec} planned, recurrent states are float32"
    return StateCache(rows.next(spec.conv_shape, dtype), rows.next(spec.ssm_shape, torch.float32))


def _runs(copies: Iterable[BlockCopy]) -> Iterator[list[BlockCopy]]:
    """Split copies into runs that can be made at once: of one group, all of whole blocks or none, no block in two."""
    run: list[BlockCopy] = []
    touched: set[int] = set()
    for copy in copies:
        blocks = {copy.source_id, copy.target_id}
        if run and (_kind(run[0]) != _kind(copy) or touched & blocks):
            yield run
            run, touched = [], set()
        run.append(copy)
        touched |= blocks
    if run:
        yield run


def _kind(copy: BlockCopy) -> tuple[int, bool]:
    return copy.group_id, copy.num_slots == WHOLE_BLOCK


def _allocate(num_bytes: int, device: torch.device | str) -> Tensor:
    try:
        # Of a type that the memory is aligned for, and that all others divide.
        return torch.empty(-(-num_bytes // 8), dtype=torch.float64, device=device).view(torch.uint8)
    except RuntimeError as error:  # torch raises nothing narrower on a CPU
        raise CapacityError(f"no memory for caches of {num_bytes:,} bytes: give the cache less") from error
