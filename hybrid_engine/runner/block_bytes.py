"""Blocks of the cache tensors as plain bytes, and back.

Of a block the bytes stand layer after layer, in the order of the layer's tensors: keys before values, convolution
inputs before recurrent states.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from hybrid_engine.groups.spec import MambaSpec
from hybrid_engine.runner.cache_tensors import CacheTensors
from hybrid_engine.step_plan import NULL_BLOCK_ID
from hybrid_engine.transfer_plan import BlockPart


class BlockBytes:
    """Reads and writes blocks of a cache as uint8 arrays on the host, wherever the cache itself lies."""

    def __init__(self, cache: CacheTensors) -> None:
        self._groups = cache.groups
        self._tensors = [
            [tensor_B for index in group.layer_indices for tensor_B in vars(cache.layers[index]).values()]
            for group in cache.groups
        ]
        self._block_bytes = [sum(_num_bytes(tensor_B[0]) for tensor_B in tensors) for tensors in self._tensors]

    def block_bytes(self, group_id: int) -> int:
        """Return the bytes of a whole block."""
        return self._block_bytes[group_id]

    def part_bytes(self, part: BlockPart) -> int:
        """Return the bytes of the first slots of a block, or of a state."""
        return sum(map(_num_bytes, self._slots(part)))

    @torch.inference_mode()
    def read_blocks(self, group_id: int, block_ids: Sequence[int]) -> np.ndarray:
        """Return whole blocks, one a row."""
        assert min(block_ids) > NULL_BLOCK_ID, f"the null block among {block_ids}"
        tensors = self._tensors[group_id]
        ids_X = torch.tensor(block_ids, device=tensors[0].device)
        return torch.cat([_as_bytes(tensor_B.index_select(0, ids_X)) for tensor_B in tensors], dim=1).cpu().numpy()

    @torch.inference_mode()
    def write_blocks(self, group_id: int, block_ids: Sequence[int], rows: np.ndarray) -> None:
        """Overwrite whole blocks, one from each row."""
        assert min(block_ids) > NULL_BLOCK_ID, f"the null block among {block_ids}"
        tensors, offset = self._tensors[group_id], 0
        ids_X = torch.tensor(block_ids, device=tensors[0].device)
        for tensor_B in tensors:
            end = offset + _num_bytes(tensor_B[0])
            page_X = torch.from_numpy(np.ascontiguousarray(rows[:, offset:end])).to(tensor_B.device)
            tensor_B.index_copy_(0, ids_X, page_X.view(tensor_B.dtype).view(len(block_ids), *tensor_B.shape[1:]))
            offset = end

    @torch.inference_mode()
    def read_part(self, part: BlockPart) -> np.ndarray:
        """Return the first slots of a block, or a state."""
        pages = [_as_bytes(slots.unsqueeze(0)) for slots in self._slots(part)]
        return torch.cat(pages, dim=1)[0].cpu().numpy()

    @torch.inference_mode()
    def write_part(self, part: BlockPart, payload: np.ndarray) -> None:
        """Overwrite the first slots of a block, or a state."""
        offset = 0
        for slots in self._slots(part):
            end = offset + _num_bytes(slots)
            # A copy: what comes from a file may be read-only, and lie anywhere.
            slots.copy_(torch.from_numpy(payload[offset:end].copy()).view(slots.dtype).view(slots.shape))
            offset = end

    def _slots(self, part: BlockPart) -> list[Tensor]:
        assert part.block_id > NULL_BLOCK_ID, f"the null block in {part}"
        blocks = [tensor_B[part.block_id] for tensor_B in self._tensors[part.group_id]]
        if isinstance(self._groups[part.group_id].spec, MambaSpec):
            return blocks
        return [block_KPD[:, : part.num_slots] for block_KPD in blocks]


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _as_bytes(rows_X: Tensor) -> Tensor:
    """Return each row's content as bytes: uint8 [X, bytes of a row]."""
    return rows_X.reshape(len(rows_X), -1).contiguous().view(torch.uint8)
