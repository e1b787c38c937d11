"""How a step's small arrays get to the device: together, in one copy out of pinned memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""What kernels like addresses to be a multiple of."""
_FIRST_BYTES = 1 << 16


class Staging:
    """A place for the arrays of one step after the other. On a CPU arrays become tensors as they lie.

    On a GPU: begin(), put() each, send(). What put() returns holds the array once send() was called, until the next
    begin(). Arrays of the same sizes in the same order get the same addresses, which CUDA graphs rely on.
    """

    def __init__(self, device: torch.device | str, *, num_bytes: int = _FIRST_BYTES) -> None:
        """num_bytes: room to begin with, on a GPU; it grows."""
        self.device = torch.device(device)
        self.is_on_host = self.device.type == "cpu"
        self._end = self._sent_end = 0
        if not self.is_on_host:
            self._open(num_bytes)
            self._copied = torch.cuda.Event()

    @property
    def num_bytes(self) -> int:
        """Room for so much, on a GPU."""
        return len(self._target)

    def begin(self) -> None:
        """Forget the last step's arrays, once the device has got them."""
        if not self.is_on_host:
            self._copied.synchronize()
            self._end = self._sent_end = 0

    def put(self, array: np.ndarray) -> Tensor:
        """Take an array; return its tensor on the device."""
        array = np.ascontiguousarray(array)
        if self.is_on_host:
            return torch.from_numpy(array)
        start = -(-self._end // _ALIGNMENT) * _ALIGNMENT
        if start + array.nbytes > self.num_bytes:
            self.send()
            self._open(max(2 * self.num_bytes, array.nbytes))
            start = 0
        self._end = start + array.nbytes
        self._source_bytes[start : self._end] = array.reshape(-1).view(np.uint8)
        dtype = torch.from_numpy(array[:0]).dtype
        return self._target[start : self._end].view(dtype).view(array.shape)

    def send(self) -> None:
        """Start the copy of what was put since."""
        if self.is_on_host or self._end == self._sent_end:
            return
        self._target[self._sent_end : self._end].copy_(self._source[self._sent_end : self._end], non_blocking=True)
        self._copied.record()
        self._sent_end = self._end

    def _open(self, num_bytes: int) -> None:
        self._source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        self._source_bytes = self._source.numpy()
        self._target = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self._end = self._sent_end = 0
