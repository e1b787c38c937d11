"""The memory behind the blocks: for each layer its keys and values, or its states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.spec import AttentionSpec, Group, LayerSpec, MambaSpec
from hybrid_engine.kernels.attention import copy_blocks
from hybrid_engine.models.base import LayerCache, StateCache
from hybrid_engine.step_plan import NULL_BLOCK_ID, BlockCopy


class CacheTensors:
    """Keys, values and states of all layers. Blocks belong to the bookkeeping; this only has their bytes.

    A block of a state group is one slot, which holds one state.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        num_blocks: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        """Allocate, uninitialised: a slot is written before it is read.

        num_blocks: usable blocks of each group; the null block, index 0, comes on top.
        The groups' layers must be 0 .. L-1. Raises CapacityError when the memory can't be had.
        """
        self.groups = tuple(groups)
        self.num_blocks = tuple(num_blocks)
        layers: dict[int, LayerCache | StateCache] = {}
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            make = _make_states if isinstance(group.spec, MambaSpec) else _make_keys_and_values
            for layer_index in group.layer_indices:
                layers[layer_index] = make(group.spec, count + 1, dtype, device)
        assert sorted(layers) == list(range(len(layers))), f"groups have layers {sorted(layers)}, some are missing"
        self.layers = tuple(layers[layer_index] for layer_index in range(len(layers)))
        """By layer index; layer 0 first."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first slots of blocks, or whole states, in every layer of their group, in the order given."""
        by_group: dict[int, list[BlockCopy]] = {}
        for copy in copies:
            self._check_block(copy.group_id, copy.source_id)
            self._check_block(copy.group_id, copy.target_id)
            by_group.setdefault(copy.group_id, []).append(copy)
        for group_id, its_copies in by_group.items():
            for layer_index in self.groups[group_id].layer_indices:
                _copy(self.layers[layer_index], its_copies)

    def copy_states(self, group_id: int, source_ids: Sequence[int], target_ids: Sequence[int]) -> None:
        """Copy whole states of a state group in every layer, all at once: no target may be a source."""
        for layer_index in self.groups[group_id].layer_indices:
            for tensor_S in vars(self.layers[layer_index]).values():
                tensor_S[list(target_ids)] = tensor_S[list(source_ids)]

    def poison(self, group_id: int, block_ids: Sequence[int], value: float) -> None:
        """Overwrite whole blocks, the null block too if asked, so that a test sees who reads what nobody wrote."""
        for layer_index in self.groups[group_id].layer_indices:
            for tensor_B in vars(self.layers[layer_index]).values():
                tensor_B[list(block_ids)] = value

    def _check_block(self, group_id: int, block_id: int) -> None:
        assert NULL_BLOCK_ID < block_id <= self.num_blocks[group_id], (
            f"block {block_id} of group {group_id}, which has 1 .. {self.num_blocks[group_id]}"
        )


def _make_keys_and_values(
    spec: LayerSpec, num_blocks: int, dtype: torch.dtype, device: torch.device | str
) -> LayerCache:
    assert isinstance(spec, AttentionSpec), spec
    assert spec.element_bytes == dtype.itemsize, f"{spec} planned, {dtype} to be kept"
    k_shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_size)
    return LayerCache(_allocate(k_shape, dtype, device), _allocate((*k_shape[:-1], spec.value_size), dtype, device))


def _make_states(spec: LayerSpec, num_blocks: int, dtype: torch.dtype, device: torch.device | str) -> StateCache:
    assert isinstance(spec, MambaSpec), spec
    assert spec.conv_element_bytes == dtype.itemsize, f"{spec} planned, {dtype} to be kept"
    assert spec.ssm_element_bytes == torch.float32.itemsize, f"{spec} planned, recurrent states are float32"
    return StateCache(
        _allocate((num_blocks, *spec.conv_shape), dtype, device),
        _allocate((num_blocks, *spec.ssm_shape), torch.float32, device),
    )


def _copy(cache: LayerCache | StateCache, copies: Sequence[BlockCopy]) -> None:
    if isinstance(cache, LayerCache):
        wanted = [(copy.source_id, copy.target_id, copy.num_slots) for copy in copies]
        copy_blocks(cache.k_BKPD, cache.v_BKPD, copies=wanted)
        return
    for copy in copies:
        cache.conv_SIW[copy.target_id] = cache.conv_SIW[copy.source_id]
        cache.ssm_S[copy.target_id] = cache.ssm_S[copy.source_id]


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch raises nothing narrower on a CPU
        raise CapacityError(f"no memory for a cache tensor {list(shape)} of {dtype}: give the cache less") from error
