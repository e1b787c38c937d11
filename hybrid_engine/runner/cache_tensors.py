"""The memory behind the blocks: a key and a value tensor for each layer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from hybrid_engine.errors import CapacityError
from hybrid_engine.groups.spec import Group
from hybrid_engine.kernels.attention import copy_blocks
from hybrid_engine.models.base import LayerCache
from hybrid_engine.step_plan import NULL_BLOCK_ID, BlockCopy


class CacheTensors:
    """Keys and values of all layers. Blocks belong to the bookkeeping; this only has their bytes."""

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
        layers: dict[int, LayerCache] = {}
        for group, count in zip(self.groups, self.num_blocks, strict=True):
            spec = group.spec
            assert spec.element_bytes == dtype.itemsize, f"{spec} planned, {dtype} to be kept"
            shape = (count + 1, spec.num_kv_heads, spec.block_size, spec.head_size)
            for layer_index in group.layer_indices:
                layers[layer_index] = LayerCache(*(_allocate(shape, dtype, device) for _ in range(2)))
        assert sorted(layers) == list(range(len(layers))), f"groups have layers {sorted(layers)}, some are missing"
        self.layers = tuple(layers[layer_index] for layer_index in range(len(layers)))
        """By layer index; layer 0 first."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Copy the first slots of blocks to others in every layer of their group, in the order given."""
        for copy in copies:
            self._check_block(copy.group_id, copy.source_id)
            self._check_block(copy.group_id, copy.target_id)
            triple = (copy.source_id, copy.target_id, copy.num_slots)
            for layer_index in self.groups[copy.group_id].layer_indices:
                cache = self.layers[layer_index]
                copy_blocks(cache.k_BKPD, cache.v_BKPD, copies=[triple])

    def poison(self, group_id: int, block_ids: Sequence[int], value: float) -> None:
        """Overwrite whole blocks, the null block too if asked, so that a test sees who reads what nobody wrote."""
        for layer_index in self.groups[group_id].layer_indices:
            cache = self.layers[layer_index]
            cache.k_BKPD[list(block_ids)] = value
            cache.v_BKPD[list(block_ids)] = value

    def _check_block(self, group_id: int, block_id: int) -> None:
        assert NULL_BLOCK_ID < block_id <= self.num_blocks[group_id], (
            f"block {block_id} of group {group_id}, which has 1 .. {self.num_blocks[group_id]}"
        )


def _allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> torch.Tensor:
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except RuntimeError as error:  # torch raises nothing narrower on a CPU
        raise CapacityError(f"no memory for a cache tensor {list(shape)} of {dtype}: give the cache less") from error
