"""Memory in large pages."""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

from torch import Tensor

_PAGE_BYTES = 1 << 21
_MADV_HUGEPAGE = 14


def use_large_pages(tensor: Tensor) -> Tensor:
    """Ask Linux for pages of 2 MiB under a new tensor on the CPU, before anything is written; return it.

    Processors look ahead in memory up to the end of a page, and a weight that is read from end to end has 512 times
    fewer of them. Linux may not give any (/sys/kernel/mm/transparent_hugepage); the tensor is the same then.
    """
    start = -(-tensor.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    end = (tensor.data_ptr() + tensor.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    if start < end and (libc := _libc()) is not None:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _MADV_HUGEPAGE)
    return tensor


@cache
def _libc() -> Any:
    return ctypes.CDLL(None) if sys.platform.startswith("linux") else None
