"""A mixture of experts on a GPU, in five launches whose grids depend on no tensor's values: they can be recorded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from triton import next_power_of_2

from hybrid_engine.kernels.linear.fp8 import round_to_fp8
from hybrid_engine.kernels.linear.gpu import pack_fp8
from hybrid_engine.kernels.moe.triton_moe import count_kernel, down_kernel, gate_up_kernel, place_kernel, sum_kernel
from hybrid_engine.kernels.triton_math import dot_precision

if TYPE_CHECKING:
    from hybrid_engine.kernels.moe import Activation

_PAIRS = 1024
_SUM_COLUMNS = 1024


@dataclass(frozen=True)
class Tiles:
    """How the products cut their work, by the rows that an expert gets on average and the dtype."""

    rows: int
    columns: int
    depth: int
    num_warps: int
    num_stages: int


def product_tiles(dtype: torch.dtype, num_pairs: int, num_experts: int, *, is_exact: bool = False) -> Tiles:
    """The table: few rows an expert, and reading weights is the work; many, and Hopper's products need 64 at least.

    is_exact: one tile whatever there is to do: another one might add in another order.
    """
    rows_each = num_pairs / num_experts
    if dtype == torch.float32:
        return Tiles(rows=16, columns=32, depth=32, num_warps=4, num_stages=2)
    if rows_each <= 12 and not is_exact:
        return Tiles(rows=16, columns=32, depth=128, num_warps=4, num_stages=4)
    if rows_each <= 80 or is_exact:
        return Tiles(rows=64, columns=64, depth=64, num_warps=4, num_stages=3)
    return Tiles(rows=128, columns=128, depth=64, num_warps=8, num_stages=3)


@dataclass(frozen=True)
class Stack:
    """The matrices of all experts in one piece."""

    data_XNK: Tensor
    scales_XN: Tensor | None = None
    """What each output is multiplied with, where the matrices are in fp8."""
    is_exact: bool = False

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        held = [self.data_XNK] if self.scales_XN is None else [self.data_XNK, self.scales_XN]
        return sum(each.numel() * each.element_size() for each in held)


def pack(matrices_XNK: Tensor, quantization: str | None, is_exact: bool) -> Stack:
    """The stack as it is, or in fp8."""
    if quantization is None:
        return Stack(matrices_XNK.contiguous(), is_exact=is_exact)
    assert quantization == "fp8", quantization
    rounded_XNK, scales_XN = round_to_fp8(matrices_XNK)
    return Stack(pack_fp8(rounded_XNK), scales_XN, is_exact)


def moe(
    x_TE: Tensor,
    weights_TC: Tensor,
    experts_TC: Tensor,
    *,
    gate_up: Stack,
    down: Stack,
    activation: Activation,
    gate_up_bias_XN: Tensor | None,
    down_bias_XE: Tensor | None,
    weighs_inputs: bool,
) -> Tensor:
    """As reference.moe."""
    num_tokens, num_chosen = experts_TC.shape
    num_experts, width, inner = down.data_XNK.shape
    num_pairs = num_tokens * num_chosen
    out_TE = torch.empty(num_tokens, width, dtype=x_TE.dtype, device=x_TE.device)
    if out_TE.numel() == 0:
        return out_TE
    if x_TE.stride(1) != 1:
        x_TE = x_TE.contiguous()
    weights_TC, experts_TC = weights_TC.contiguous(), experts_TC.contiguous()
    tiles = product_tiles(x_TE.dtype, num_pairs, num_experts, is_exact=gate_up.is_exact)
    row_pairs_X, tiles_X3 = _sort(experts_TC, num_experts, tiles.rows)
    hidden_XI = torch.empty(num_pairs, inner, dtype=x_TE.dtype, device=x_TE.device)
    options = {
        "TILE": tiles.rows,
        "COLUMNS": tiles.columns,
        "DEPTH": tiles.depth,
        "PRECISION": dot_precision(x_TE.dtype),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    gate_up_kernel[(len(tiles_X3), -(-inner // tiles.columns))](
        x_TE,
        gate_up.data_XNK,
        weights_TC if gate_up.scales_XN is None else gate_up.scales_XN,
        weights_TC if gate_up_bias_XN is None else gate_up_bias_XN.contiguous(),
        weights_TC,
        hidden_XI,
        row_pairs_X,
        tiles_X3,
        activation.alpha,
        activation.limit,
        x_TE.stride(0),
        CHOSEN=num_chosen,
        INPUTS=gate_up.data_XNK.shape[2],
        INNER=inner,
        KIND=activation.kind,
        IS_GATED=activation.is_gated,
        HAS_SCALES=gate_up.scales_XN is not None,
        HAS_BIAS=gate_up_bias_XN is not None,
        WEIGHS_INPUTS=weighs_inputs,
        **options,
    )
    by_pair_XE = torch.empty(num_pairs, width, dtype=x_TE.dtype, device=x_TE.device)
    down_kernel[(len(tiles_X3), -(-width // tiles.columns))](
        hidden_XI,
        down.data_XNK,
        weights_TC if down.scales_XN is None else down.scales_XN,
        weights_TC if down_bias_XE is None else down_bias_XE.contiguous(),
        by_pair_XE,
        row_pairs_X,
        tiles_X3,
        INPUTS=inner,
        OUTPUTS=width,
        HAS_SCALES=down.scales_XN is not None,
        HAS_BIAS=down_bias_XE is not None,
        **options,
    )
    sum_kernel[(num_tokens, -(-width // _SUM_COLUMNS))](
        by_pair_XE,
        weights_TC,
        out_TE,
        CHOSEN=num_chosen,
        OUTPUTS=width,
        IS_WEIGHED=not weighs_inputs,
        COLUMNS=_SUM_COLUMNS,
    )
    return out_TE


def _sort(experts_TC: Tensor, num_experts: int, tile_rows: int) -> tuple[Tensor, Tensor]:
    """The pair of each row, int32 [rows]; expert, first row and end of each tile that may be, int32 [tiles, 3]."""
    num_pairs = experts_TC.numel()
    # An expert's last tile may hold a single row; no more experts have one than there are pairs.
    num_tiles = num_pairs // tile_rows + min(num_pairs, num_experts)
    counts_X, row_pairs_X, tiles_X3 = (
        torch.empty(shape, dtype=torch.int32, device=experts_TC.device)
        for shape in ((num_experts,), (num_pairs,), (num_tiles, 3))
    )
    count_kernel[(num_experts,)](experts_TC, counts_X, num_pairs, PAIRS=_PAIRS)
    place_kernel[(num_experts,)](
        experts_TC,
        counts_X,
        row_pairs_X,
        tiles_X3,
        num_pairs,
        num_tiles,
        EXPERTS=num_experts,
        PADDED=next_power_of_2(num_experts),
        PAIRS=_PAIRS,
        TILE=tile_rows,
    )
    return row_pairs_X, tiles_X3
