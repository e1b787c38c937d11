"""The highest output of each row, on a CPU, without computing most outputs exactly (screen.h).

Whoever wants only the most likely token needs no other logit. A head in bfloat16 then takes half the memory traffic,
and nearly half the work where several rows share it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.linear import cpu
from hybrid_engine.kernels.linear.int8 import MOST_INPUTS
from hybrid_engine.kernels.linear.packed import PackedLinear
from hybrid_engine.kernels.native import num_threads

ROWS_AT_ONCE = 4096
"""Rows of a weight that are unpacked at the same time."""
NOT_FOUND = -2
MOST_SKIPPED = 64
"""Calls between two tries where no try succeeds."""


class Screen:
    """A copy in 8 bits of a weight that is packed in tiles, and how far from exact its products can be."""

    def __init__(self, packed: PackedLinear) -> None:
        """packed: can_screen() must have said yes."""
        self._packed = packed
        num_outputs, num_inputs = packed.num_outputs, packed.num_inputs
        integers_NK = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
        corrections_N = torch.empty(num_outputs, dtype=torch.int32)
        scales_N, norms_N, errors_N = torch.empty(3, num_outputs)
        for start in range(0, num_outputs, ROWS_AT_ONCE):
            rows_XK = packed.rows(torch.arange(start, min(start + ROWS_AT_ONCE, num_outputs)))
            outs = (integers_NK, scales_N, corrections_N, norms_N, errors_N)
            cpu.library.load().screen_rows(
                rows_XK.data_ptr(),
                num_inputs,
                rows_XK.dtype == torch.bfloat16,
                *(out[start:].data_ptr() for out in outs),
                *rows_XK.shape,
                num_threads(),
            )
        self.is_usable = bool((norms_N + errors_N).isfinite().all())
        """Whether all weights are finite: no bound holds for others."""
        padding = (0, -num_outputs % 16)
        self._corrections_N = F.pad(corrections_N, padding)
        self._scales_N, self._norms_N, self._errors_N = (F.pad(each, padding) for each in (scales_N, norms_N, errors_N))
        self._data = cpu.pack_tiles(integers_NK, group=4)
        self._num_misses, self._num_skipped = 0, 0

    @property
    def num_bytes(self) -> int:
        """Bytes held, beside the weight's own."""
        return sum(each.numel() * each.element_size() for each in vars(self).values() if isinstance(each, Tensor))

    def highest(self, x_TK: Tensor, *, divisor: float = 1.0) -> Tensor | None:
        """The place of each row's highest output, of equal ones the first; -1 where it isn't finite: int64 [T].

        x_TK: of the weight's dtype. divisor: of outputs, above 0; it makes some equal.
        None: so many outputs are near a row's highest one that computing all of them is as good; where that happens
        again and again, it is no longer tried each time.
        """
        if self._num_skipped + 1 < min(2 ** (self._num_misses - 1), MOST_SKIPPED):
            self._num_skipped += 1
            return None
        self._num_skipped = 0
        if self._packed.num_inputs % 2:
            x_TK = F.pad(x_TK, (0, 1))
        elif x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        found_T = torch.empty(len(x_TK), dtype=torch.int64)
        tensors = (self._data, self._scales_N, self._corrections_N, self._norms_N, self._errors_N)
        cpu.library.load().highest(
            x_TK.data_ptr(),
            x_TK.stride(0),
            x_TK.dtype == torch.bfloat16,
            self._packed.data.data_ptr(),
            *(tensor.data_ptr() for tensor in tensors),
            divisor,
            found_T.data_ptr(),
            len(x_TK),
            self._packed.num_outputs,
            self._packed.num_inputs,
            num_threads(),
        )
        is_found = not (len(found_T) and int(found_T[0]) == NOT_FOUND)
        self._num_misses = 0 if is_found else self._num_misses + 1
        return found_T if is_found else None


def can_screen(packed: PackedLinear) -> bool:
    """Whether a weight is in tiles of its own dtype, on a CPU."""
    return isinstance(packed.form, cpu.TiledForm) and 0 < packed.num_inputs <= MOST_INPUTS
