"""Linear layers on a CPU, in tiles by our own product; by torch where no C++ can be built.

A row's result is the same to the last bit whatever rows are beside it: each output is summed over its inputs in order.

Against torch's bfloat16 linear the tiles take a third of the time for one row, where reading the weight is the work,
half for 16, and as long for thousands.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.native import NativeLibrary, num_threads

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16"}
_DEPTH = {torch.float32: 1, torch.bfloat16: 2}
"""Inputs that lie side by side in a tile, as in tile.h."""

library = NativeLibrary(
    __package__,
    {f"pack_{name}": "plpll" for name in _NAMES.values()}
    | {f"unpack_rows_{name}": "ppplll" for name in _NAMES.values()}
    | {f"linear_{name}_to_{out}": "plppplll" for name in _NAMES.values() for out in _NAMES.values()},
)


def pack(weight_NK: Tensor) -> Tensor | None:
    """The weight in tiles, or None where the plain layout is the one to keep."""
    native = library.load()
    if native is None or 0 in weight_NK.shape:
        return None
    if weight_NK.stride(1) != 1:
        weight_NK = weight_NK.contiguous()
    num_outputs, num_inputs = weight_NK.shape
    depth = _DEPTH[weight_NK.dtype]
    # Whole tiles of 16 outputs, whole pairs of inputs.
    tiles = torch.empty(-(-num_outputs // 16) * 16 * -(-num_inputs // depth) * depth, dtype=weight_NK.dtype)
    pack = getattr(native, f"pack_{_NAMES[weight_NK.dtype]}")
    pack(weight_NK.data_ptr(), weight_NK.stride(0), tiles.data_ptr(), num_outputs, num_inputs, num_threads())
    return tiles


def check_ids(ids_T: Tensor, num_outputs: int) -> None:
    """Raise IndexError when an id is no row of the weight: torch would count negative ones from the end."""
    if len(ids_T) and not 0 <= int(ids_T.min()) <= int(ids_T.max()) < num_outputs:
        raise IndexError(f"ids_T holds {int(ids_T.min())} .. {int(ids_T.max())}, must be within [0, {num_outputs})")


def rows_tiled(tiles: Tensor, ids_T: Tensor, *, num_outputs: int, num_inputs: int) -> Tensor:
    """Rows of a tiled weight."""
    ids_T = ids_T.contiguous()
    out_TK = torch.empty(len(ids_T), num_inputs, dtype=tiles.dtype)
    native = library.load()
    unpack_rows = getattr(native, f"unpack_rows_{_NAMES[tiles.dtype]}")
    unpack_rows(
        tiles.data_ptr(), ids_T.data_ptr(), out_TK.data_ptr(), len(ids_T), num_outputs, num_inputs, num_threads()
    )
    return out_TK


def linear_tiled(
    x_TK: Tensor, tiles: Tensor, num_outputs: int, bias_N: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """x times the transpose of a tiled weight."""
    num_tokens, num_inputs = x_TK.shape
    if num_inputs % _DEPTH[tiles.dtype]:
        x_TK = F.pad(x_TK, (0, 1))
    elif x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if bias_N is not None:
        bias_N = bias_N.float().contiguous()
    out_TN = torch.empty(num_tokens, num_outputs, dtype=out_dtype)
    native = library.load()
    run = getattr(native, f"linear_{_NAMES[tiles.dtype]}_to_{_NAMES[out_dtype]}")
    run(
        x_TK.data_ptr(),
        x_TK.stride(0),
        tiles.data_ptr(),
        None if bias_N is None else bias_N.data_ptr(),
        out_TN.data_ptr(),
        num_tokens,
        num_outputs,
        num_inputs,
        num_threads(),
    )
    return out_TN


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """torch's own linear."""
    bias_N = bias_N if bias_N is None else bias_N.to(x_TK.dtype)
    return F.linear(x_TK, weight_NK, bias_N).to(out_dtype)
