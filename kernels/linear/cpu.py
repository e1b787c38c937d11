"""Linear layers on a CPU: bfloat16 in tiles by our own product, the rest by torch.

Against torch's bfloat16 linear the tiles take a third of the time for one row, where reading the weight is the work,
half for 16, and as long for thousands. float32 stays with torch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.native import NativeLibrary, num_threads

library = NativeLibrary(
    __package__,
    {
        "pack": "plpll",
        "unpack_rows": "ppplll",
        "linear_to_bf16": "plppplll",
        "linear_to_float": "plppplll",
        "pack_int8": "plpll",
        "unpack_int8_rows": "ppplll",
        "linear_int8": "pliipppppilll",
    },
)


def can_tile(weight_NK: Tensor) -> bool:
    """Whether the weight is better kept in tiles."""
    return weight_NK.dtype == torch.bfloat16 and 0 not in weight_NK.shape and library.load() is not None


class TiledForm:
    """A bfloat16 weight in tiles."""

    def __init__(self, weight_NK: Tensor) -> None:
        """Pack it; can_tile() must have said yes."""
        if weight_NK.stride(1) != 1:
            weight_NK = weight_NK.contiguous()
        self.dtype = weight_NK.dtype
        self.shape = num_outputs, num_inputs = tuple(weight_NK.shape)
        # Whole tiles of 16 outputs, whole pairs of inputs.
        self.data = torch.empty((num_outputs + 15) // 16 * 16 * ((num_inputs + 1) // 2 * 2), dtype=self.dtype)
        native = library.load()
        native.pack(weight_NK.data_ptr(), weight_NK.stride(0), self.data.data_ptr(), *self.shape, num_threads())

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.data.element_size()

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight."""
        ids_T = ids_T.contiguous()
        out_TK = torch.empty(len(ids_T), self.shape[1], dtype=self.dtype)
        pointers = (self.data.data_ptr(), ids_T.data_ptr(), out_TK.data_ptr())
        library.load().unpack_rows(*pointers, len(ids_T), *self.shape, num_threads())
        return out_TK

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear."""
        if self.shape[1] % 2:
            x_TK = F.pad(x_TK, (0, 1))
        elif x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        if bias_N is not None:
            bias_N = bias_N.float().contiguous()
        out_TN = torch.empty(len(x_TK), self.shape[0], dtype=out_dtype)
        native = library.load()
        run = native.linear_to_bf16 if out_dtype == torch.bfloat16 else native.linear_to_float
        run(
            x_TK.data_ptr(),
            x_TK.stride(0),
            self.data.data_ptr(),
            None if bias_N is None else bias_N.data_ptr(),
            out_TN.data_ptr(),
            len(x_TK),
            *self.shape,
            num_threads(),
        )
        return out_TN


def check_ids(ids_T: Tensor, num_outputs: int) -> None:
    """Raise IndexError when an id is no row of the weight: torch would count negative ones from the end."""
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < num_outputs:
        raise IndexError(f"ids_T holds {int(ids_T.min())} .. {int(ids_T.max())}, must be within [0, {num_outputs})")


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """torch's own linear."""
    bias_N = bias_N if bias_N is None else bias_N.to(x_TK.dtype)
    return F.linear(x_TK, weight_NK, bias_N).to(out_dtype)
