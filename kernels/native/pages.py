"""Memory in large pages, for what is read from end to end.

Processors look ahead in memory up to the end of a page, and pages of 2 MiB have 512 times fewer ends. Linux may not
give any (/sys/kernel/mm/transparent_hugepage); the memory is the same then.
"""

from __future__ import annotations

import mmap
from contextlib import suppress
from threading import Lock

import torch
from torch import Tensor

_PAGE_BYTES = 1 << 21
_CHUNK_BYTES = 1 << 25
_LEAST_BYTES = 1 << 16
_ALIGNMENT = 64
"""Bytes of a line of the processor's caches."""


class LargePages:
    """Makes tensors that live about as long as each other, like a model's weights.

    A matrix of a small model is no longer than a large page, and fills none by itself: such tensors share chunks of
    32 MiB, which are given back when the last of their tensors is.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk: Tensor | None = None
        self._start = 0

    def empty(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor on the CPU whose elements nobody has written. Raises MemoryError where there is no room."""
        num_bytes = num_elements * dtype.itemsize
        if num_bytes < _LEAST_BYTES:
            return torch.empty(num_elements, dtype=dtype)
        if num_bytes >= _CHUNK_BYTES:
            return _new_memory(num_bytes).view(dtype)
        with self._lock:
            if self._chunk is None or self._start + num_bytes > self._chunk.nbytes:
                self._chunk = _new_memory(_CHUNK_BYTES)
                self._start = 0
            start, self._start = self._start, -(-(self._start + num_bytes) // _ALIGNMENT) * _ALIGNMENT
            return self._chunk[start : start + num_bytes].view(dtype)


large_pages = LargePages()


def _new_memory(num_bytes: int) -> Tensor:
    """Return bytes that begin at a large page.

    Of a mapping of their own: what malloc gives may have been used before, and keeps the pages that it had then.
    """
    if not hasattr(mmap, "MADV_HUGEPAGE"):  # not Linux
        return torch.empty(num_bytes, dtype=torch.uint8)
    try:
        mapping = mmap.mmap(-1, num_bytes + _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for a tensor of {num_bytes:,} bytes") from error
    with suppress(OSError):  # a kernel without large pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    start = -memory.data_ptr() % _PAGE_BYTES
    return memory[start : start + num_bytes]
