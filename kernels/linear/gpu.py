"""Linear layers on a GPU: cuBLAS through torch, which accumulates in float32; where bits must stay, our own kernel.

Weights in fp8 are widened in the registers of a kernel of ours.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.linear.triton_fp8 import fp8_linear_kernel
from hybrid_engine.kernels.linear.triton_linear import rows_kernel
from hybrid_engine.kernels.triton_math import dot_precision
from hybrid_engine.kernels.triton_product import knows_fp8


@dataclass(frozen=True)
class Tiles:
    """How a product with weights in fp8 is cut."""

    tokens: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def fp8_tiles(dtype: torch.dtype, num_tokens: int, num_outputs: int) -> Tiles:
    """The table: narrow tiles where there are few tokens, so that all processors read; narrower for few outputs."""
    if dtype == torch.float32:
        return Tiles(tokens=16, columns=32, depth=32, num_warps=4, num_stages=2)
    if num_tokens <= 16:
        return Tiles(tokens=16, columns=32 if num_outputs > 4096 else 16, depth=256, num_warps=4, num_stages=4)
    if num_tokens <= 64:
        return Tiles(tokens=32 if num_tokens <= 32 else 64, columns=32, depth=128, num_warps=4, num_stages=4)
    return Tiles(tokens=128, columns=128, depth=64, num_warps=8, num_stages=3)


_ROWS, _COLUMNS = 64, 64
"""One tile whatever there is to do: another one might add in another order."""
_STEP = {torch.bfloat16: 64, torch.float32: 32}


def linear(
    x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype, is_exact: bool = False
) -> Tensor:
    """As reference.linear. is_exact: a row doesn't depend on those beside it."""
    if is_exact:
        return _linear_by_rows(x_TK, weight_NK, bias_N, out_dtype)
    if x_TK.dtype == out_dtype:
        return F.linear(x_TK, weight_NK, bias_N if bias_N is None else bias_N.to(out_dtype))
    # The product in float32 as it was summed up (logits): nothing is rounded on the way.
    out_TN = torch.mm(x_TK, weight_NK.T, out_dtype=out_dtype) if out_dtype == torch.float32 else x_TK @ weight_NK.T
    return (out_TN if bias_N is None else out_TN + bias_N).to(out_dtype)


def _linear_by_rows(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    x_TK = x_TK if x_TK.stride(1) == 1 else x_TK.contiguous()
    (num_rows, num_inputs), num_outputs = x_TK.shape, len(weight_NK)
    out_TN = torch.empty(num_rows, num_outputs, dtype=out_dtype, device=x_TK.device)
    if out_TN.numel():
        rows_kernel[(-(-num_outputs // _COLUMNS), -(-num_rows // _ROWS))](
            x_TK,
            weight_NK,
            weight_NK if bias_N is None else bias_N.contiguous(),
            out_TN,
            num_rows,
            x_TK.stride(0),
            INPUTS=num_inputs,
            OUTPUTS=num_outputs,
            HAS_BIAS=bias_N is not None,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
            STEP=_STEP[x_TK.dtype],
            PRECISION=dot_precision(x_TK.dtype),
            num_warps=4,
            num_stages=1,
        )
    return out_TN


def pack_fp8(rounded: Tensor) -> Tensor:
    """Weights as kernels take them: as they are, or as bytes for a GPU that doesn't know fp8."""
    return rounded if knows_fp8(rounded.device) else rounded.view(torch.uint8)


def fp8_linear(
    x_TK: Tensor, data_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """As reference.fp8_linear: inputs keep their bits however many they are, so that a hit is as good as no hit."""
    num_tokens, (num_outputs, num_inputs) = len(x_TK), data_NK.shape
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    out_TN = torch.empty(num_tokens, num_outputs, dtype=out_dtype, device=x_TK.device)
    if out_TN.numel() == 0:
        return out_TN
    tiles = fp8_tiles(x_TK.dtype, num_tokens, num_outputs)
    fp8_linear_kernel[(-(-num_tokens // tiles.tokens), -(-num_outputs // tiles.columns))](
        x_TK,
        data_NK,
        scales_N,
        scales_N if bias_N is None else bias_N,
        out_TN,
        num_tokens,
        x_TK.stride(0),
        INPUTS=num_inputs,
        OUTPUTS=num_outputs,
        HAS_BIAS=bias_N is not None,
        TILE=tiles.tokens,
        COLUMNS=tiles.columns,
        DEPTH=tiles.depth,
        PRECISION=dot_precision(x_TK.dtype),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    return out_TN
