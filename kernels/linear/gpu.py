"""Linear layers on a GPU: cuBLAS through torch, which accumulates in float32; weights in fp8 by Triton or as fp8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from hybrid_engine.kernels.linear.triton_fp8 import fp8_linear_kernel, round_rows_kernel
from hybrid_engine.kernels.triton_math import dot_precision
from hybrid_engine.kernels.triton_product import capability, knows_fp8

FEW_TOKENS = 64
"""Up to so many tokens reading the weight takes longer than multiplying it, and inputs keep their bits."""
_DEPTH = 1024


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


def linear(x_TK: Tensor, weight_NK: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype) -> Tensor:
    """As reference.linear."""
    if x_TK.dtype == out_dtype:
        return F.linear(x_TK, weight_NK, bias_N if bias_N is None else bias_N.to(out_dtype))
    # The product in float32 as it was summed up (logits): nothing is rounded on the way.
    out_TN = torch.mm(x_TK, weight_NK.T, out_dtype=out_dtype) if out_dtype == torch.float32 else x_TK @ weight_NK.T
    return (out_TN if bias_N is None else out_TN + bias_N).to(out_dtype)


def pack_fp8(rounded: Tensor) -> Tensor:
    """Weights as kernels take them: as they are, or as bytes for a GPU that doesn't know fp8."""
    return rounded if knows_fp8(rounded.device) else rounded.view(torch.uint8)


def fp8_linear(
    x_TK: Tensor, data_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None, *, out_dtype: torch.dtype
) -> Tensor:
    """As reference.fp8_linear; many tokens are rounded to fp8 too, each by its own largest element."""
    num_tokens, (num_outputs, num_inputs) = len(x_TK), data_NK.shape
    if x_TK.stride(1) != 1:
        x_TK = x_TK.contiguous()
    if rounds_inputs(x_TK, data_NK, out_dtype):
        return _fp8_by_fp8(x_TK, data_NK, scales_N, bias_N)
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


def rounds_inputs(x_TK: Tensor, data_NK: Tensor, out_dtype: torch.dtype) -> bool:
    """Whether a product is one of fp8 with fp8: many tokens, from Hopper on, in sizes that the library takes."""
    is_bfloat16 = x_TK.dtype == out_dtype == torch.bfloat16
    is_worth_it = len(x_TK) > FEW_TOKENS and all(size % 16 == 0 for size in data_NK.shape)
    return is_bfloat16 and is_worth_it and capability(data_NK.device) >= 90


def _fp8_by_fp8(x_TK: Tensor, data_NK: Tensor, scales_N: Tensor, bias_N: Tensor | None) -> Tensor:
    num_tokens, num_inputs = x_TK.shape
    rounded_TK = torch.empty(x_TK.shape, dtype=torch.float8_e4m3fn, device=x_TK.device)
    scales_T1 = torch.empty(num_tokens, 1, dtype=torch.float32, device=x_TK.device)
    round_rows_kernel[(num_tokens,)](x_TK, rounded_TK, scales_T1, x_TK.stride(0), INPUTS=num_inputs, DEPTH=_DEPTH)
    out_TN = torch._scaled_mm(
        rounded_TK, data_NK.T, scale_a=scales_T1, scale_b=scales_N[None], out_dtype=torch.bfloat16
    )
    return out_TN if bias_N is None else (out_TN + bias_N).to(torch.bfloat16)
