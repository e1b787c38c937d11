"""Linear layers on a CPU: weights in tiles, multiplied by our own product; by torch where there is no compiler.

Against torch's linear the tiles take a third of the time for one row of bfloat16, where reading the weight is the work,
half for 16, and as long for hundreds; in float32 from a third (of 4 rows) to nine tenths (of one, and of hundreds).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.native import NativeLibrary, num_threads
from hybrid_engine.kernels.native.pages import large_pages

library = NativeLibrary(
    __package__,
    {
        "pack": "plipll",
        "unpack_rows": "pipplll",
        "linear_floats": "plipppilll",
        "linear_gated": "plipppilll",
        "linear_int8": "pliipppppilll",
        "screen_rows": "plipppppll",
        "highest": "plippppppfplll",
    },
)

PANEL = 64
"""Outputs that lie side by side: layout.h."""


def can_tile(weight_NK: Tensor) -> bool:
    """Whether the weight is better kept in tiles."""
    return 0 not in weight_NK.shape and library.load() is not None


def pack_tiles(weight_NK: Tensor, *, group: int) -> Tensor:
    """The elements in tiles: outputs filled up to whole tiles of 16, inputs to whole groups (layout.h)."""
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    num_outputs, num_inputs = weight_NK.shape
    size = (num_outputs + 15) // 16 * 16 * ((num_inputs + group - 1) // group * group)
    tiles = large_pages.empty(size, weight_NK.dtype)
    pointer, stride = weight_NK.data_ptr(), weight_NK.stride(0)
    library.load().pack(pointer, stride, weight_NK.itemsize, tiles.data_ptr(), num_outputs, num_inputs, num_threads())
    return tiles


def unpack_rows(tiles: Tensor, ids_T: Tensor, *, shape: tuple[int, int]) -> Tensor:
    """Rows of a weight [N, K] = shape whose elements lie in tiles."""
    ids_T = ids_T.contiguous()
    out_TK = torch.empty(len(ids_T), shape[1], dtype=tiles.dtype)
    pointers = (ids_T.data_ptr(), out_TK.data_ptr())
    library.load().unpack_rows(tiles.data_ptr(), tiles.itemsize, *pointers, len(ids_T), *shape, num_threads())
    return out_TK


class TiledForm:
    """A weight in tiles: sums over inputs run in their order, so that a token is the same bits in any company."""

    def __init__(self, weight_NK: Tensor) -> None:
        """Pack it; can_tile() must have said yes."""
        self.dtype = weight_NK.dtype
        self.shape = (weight_NK.shape[0], weight_NK.shape[1])
        self.data = pack_tiles(weight_NK, group=2 if self.dtype == torch.bfloat16 else 1)

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return self.data.numel() * self.data.itemsize

    def rows(self, ids_T: Tensor) -> Tensor:
        """Rows of the weight."""
        return unpack_rows(self.data, ids_T, shape=self.shape)

    def multiply(self, x_TK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
        """As reference.linear."""
        out_TN = torch.empty(len(x_TK), self.shape[0], dtype=out_dtype)
        self._run("linear_floats", x_TK, bias_N, out_TN, out_dtype == torch.bfloat16)
        return out_TN

    def can_gate(self, kind: str) -> bool:
        """Whether multiply_gated() can: both halves of the outputs are whole panels."""
        return kind in ("gelu_tanh", "silu") and self.shape[0] % (2 * PANEL) == 0

    def multiply_gated(self, x_TK: Tensor, bias_N: Tensor | None, *, kind: str) -> Tensor:
        """act(gate) * up, with the bits that multiply() and then act_mul() would give."""
        out_TI = torch.empty(len(x_TK), self.shape[0] // 2, dtype=self.dtype)
        self._run("linear_gated", x_TK, bias_N, out_TI, kind == "gelu_tanh")
        return out_TI

    def _run(self, function: str, x_TK: Tensor, bias_N: Tensor | None, out: Tensor, option: bool) -> None:
        if self.shape[1] % 2:
            x_TK = F.pad(x_TK, (0, 1))
        elif x_TK.stride(1) != 1:
            x_TK = x_TK.contiguous()
        if bias_N is not None:
            bias_N = bias_N.float().contiguous()
        getattr(library.load(), function)(
            x_TK.data_ptr(),
            x_TK.stride(0),
            self.dtype == torch.bfloat16,
            self.data.data_ptr(),
            None if bias_N is None else bias_N.data_ptr(),
            out.data_ptr(),
            option,
            len(x_TK),
            *self.shape,
            num_threads(),
        )


def check_ids(ids_T: Tensor, num_outputs: int) -> None:
    """Raise IndexError when an id is no row of the weight: torch would count negative ones from the end."""
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < num_outputs:
        raise IndexError(f"ids_T holds {int(ids_T.min())} .. {int(ids_T.max())}, must be within [0, {num_outputs})")


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype, is_exact: bool = False
) -> Tensor:
    """torch's own linear; is_exact: row by row, for the order that it adds in depends on how many there are."""
    if is_exact and len(x_TK) > 1:
        return torch.cat([linear(x_1K, weight_NK, bias_N, out_dtype=out_dtype) for x_1K in x_TK.split(1)])
    bias_N = bias_N if bias_N is None else bias_N.to(x_TK.dtype)
    return F.linear(x_TK, weight_NK, bias_N).to(out_dtype)
